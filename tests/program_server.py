"""Run Python programs without starting Python: fork a process that has imported torch already.

Started by programs.py with a socket's path; ends when its standard input closes. A client sends
arguments, directory, environment, the three standard streams and its network namespace. It is told
the program's process number at once, and its exit code at the end (below 0: the signal). If the
client dies, its program is killed.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path

PRELOADED = [
    "torch.distributed.run",
    "torch.fx.experimental.symbolic_shapes",
    "megazoo.testing",
    "pretrain_gpt",
]
LARGEST_REQUEST = 1 << 18  # bytes


def serve(path: str) -> tuple[list[str], str, dict[str, str]] | None:
    """Fork a process for each request: returns the request there, its streams in place; None at the
    server's end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    # file descriptor of a process -> its client, its number
    running: dict[int, tuple[socket.socket, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for _, pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                request, streams, _, _ = socket.recv_fds(client, LARGEST_REQUEST, 4)
                if not request:  # the client died before it asked
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for each in [listener, client, *(other for other, _ in running.values())]:
                        each.close()
                    for process in running:
                        os.close(process)
                    _take_over(streams)
                    return marshal.loads(request)
                for stream in streams:
                    os.close(stream)
                process = os.pidfd_open(pid)
                running[process] = client, pid
                _send(client, pid)
                selector.register(client, selectors.EVENT_READ, process)
                selector.register(process, selectors.EVENT_READ)
            elif key.data is None:  # a program has ended
                client, pid = running.pop(key.fd)
                _send(client, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                selector.unregister(key.fd)
                os.close(key.fd)
                if client in selector.get_map():
                    selector.unregister(client)
                client.close()
            else:  # a client has died; its program's end is met above, unless it was in this round
                client, pid = running.get(key.data, (None, 0))
                if client is key.fileobj:
                    selector.unregister(client)
                    os.kill(pid, signal.SIGKILL)


def _send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it has died
        client.send(str(number).encode())


def _take_over(streams: list[int]) -> None:
    """Make the client's standard streams and network namespace this process's own."""
    *standard, network = streams
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
        os.close(stream)
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def become(words: list[str], directory: str, environment: dict[str, str]) -> None:
    """Be, as far as a program can tell, a Python that was just started with these arguments."""
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment["MEGAZOO_TEST_PYTHON"]
    for name, number in (("stdout", 1), ("stderr", 2)):
        at_once = (
            {"write_through": True}
            if environment.get("PYTHONUNBUFFERED")
            else {"line_buffering": number == 2}
        )
        stream = io.TextIOWrapper(open(number, "wb", closefd=False), **at_once)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    threads = environment.get("OMP_NUM_THREADS")
    if threads:
        sys.modules["torch"].set_num_threads(int(threads))
    first = directory if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()


def run(words: list[str]) -> None:
    """Run `-m MODULE ...`, `-c CODE ...` or `FILE ...` as the main program."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    sys.path.insert(0, str(Path(__file__).parent.parent))  # for what is imported before
    for module in PRELOADED:
        importlib.import_module(module)
    del sys.path[0], sys.modules["torch.distributed.run"]  # it runs as the main program, too: anew
    gc.collect()
    gc.freeze()
    request = serve(sys.argv[1])
    if request:
        become(*request)
        run(request[0])
