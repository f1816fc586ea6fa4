"""Run Python programs without starting Python: fork a process that has imported torch already.

Started by programs.py with a socket's path; ends when its standard input closes. A client sends
arguments, directory, environment, the three standard streams and its network namespace. It is told
the program's process number at once, and its exit code at the end (below 0: the signal). If the
client dies, its program is killed.
"""

import atexit
import contextlib
import ctypes
import importlib
import io
import itertools
import marshal
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path

PRELOADED = [
    "torch.distributed.run",
    "torch.fx.experimental.symbolic_shapes",
    "megazoo.testing",
    "megazoo.pretrain",
    "torch._dynamo",
    "tests.support.warm",
]
LARGEST_REQUEST = 1 << 18  # bytes


class Server:
    """Forks a process for each request, and tells its client the process's number and exit code."""

    def __init__(self, path: str):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        # The file descriptor of a process: its client, its number.
        self.running: dict[int, tuple[socket.socket, int]] = {}

    def serve(self) -> tuple[list[str], str, dict[str, str]] | None:
        """Return the request in each process that is forked for one, its streams in place; None at
        the server's end."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    for _, pid in self.running.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self.listener:
                    request = self.accept()
                    if request:
                        return marshal.loads(request)
                elif key.data is None:
                    self.end(key.fd)
                else:
                    self.kill(key.fileobj, key.data)

    def accept(self) -> bytes | None:
        """Fork a process for a request. Return the request there, and None here."""
        client, _ = self.listener.accept()
        request, streams, _, _ = socket.recv_fds(client, LARGEST_REQUEST, 4)
        if not request:  # the client died before it asked
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            for each in [self.listener, client, *(other for other, _ in self.running.values())]:
                each.close()
            for process in self.running:
                os.close(process)
            _take_over(streams)
            return request
        for stream in streams:
            os.close(stream)
        process = os.pidfd_open(pid)
        self.running[process] = client, pid
        _send(client, pid)
        self.selector.register(client, selectors.EVENT_READ, process)
        self.selector.register(process, selectors.EVENT_READ)
        return None

    def end(self, process: int) -> None:
        """Tell the client of a program that has ended its exit code."""
        client, pid = self.running.pop(process)
        _send(client, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        self.selector.unregister(process)
        os.close(process)
        if client in self.selector.get_map():
            self.selector.unregister(client)
        client.close()

    def kill(self, client: socket.socket, process: int) -> None:
        """Kill the program of a client that has died; its end is met later, unless it was met in
        this round."""
        owner, pid = self.running.get(process, (None, 0))
        if owner is client:
            self.selector.unregister(client)
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
        unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
        stream = io.TextIOWrapper(
            open(number, "wb", closefd=False),  # noqa: SIM115
            write_through=unbuffered,
            line_buffering=number == 2 and not unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    threads = environment.get("OMP_NUM_THREADS")
    if threads:
        sys.modules["torch"].set_num_threads(int(threads))
    first = directory if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    multiprocessing.util.spawnv_passfds = fork_interpreter


start_interpreter = multiprocessing.util.spawnv_passfds


def fork_interpreter(path: str, arguments: list[str], passed: list[int]) -> int:
    """Start a Python of multiprocessing (a fork server, a worker) as a fork of this process, which
    has imported torch; return its number. A process with threads can't be forked safely."""
    code, *rest = arguments[arguments.index("-c") + 1 :]
    if "resource_tracker" in code or len(os.listdir("/proc/self/task")) > 1:
        return start_interpreter(path, arguments, passed)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.forkserver._forkserver._lock = threading.Lock()  # was held to start this
        for first, end in itertools.pairwise([2, *sorted(map(int, passed)), 1 << 16]):
            os.closerange(first + 1, end)
        sys.argv[:] = ["-c", *rest]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


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


def end_with(function, *arguments) -> None:
    """Call a function, and end this process as Python does, except that modules are not freed: that
    takes 0.3 s."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = status or 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    sys.path.insert(0, str(Path(__file__).parents[2]))  # for what is imported before
    for module in PRELOADED:
        importlib.import_module(module)
    del sys.path[0], sys.modules["torch.distributed.run"]  # it runs as the main program, too: anew
    request = Server(sys.argv[1]).serve()
    if request:
        become(*request)
        end_with(run, request[0])
