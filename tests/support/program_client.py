"""Stand in for `python` in tests: have the program server run a command line, pass signals on, end
as it ended.

Run as `python -I -S program_client.py SOCKET REAL_PYTHON ARGUMENTS`; programs.py writes a script
that does so. A command line that the server does not understand is left to the real Python. Imports
next to nothing, for its start is what the server saves.
"""

import marshal
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(server: str, real_python: str, *arguments: str) -> None:
    unbuffered = arguments[:1] == ("-u",)
    words = list(arguments[unbuffered:])
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        os.execv(real_python, [real_python, *arguments])
    if unbuffered:
        os.environ["PYTHONUNBUFFERED"] = "1"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server)
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    request = marshal.dumps((words, os.getcwd(), dict(os.environ)))
    socket.send_fds(connection, [request], [0, 1, 2, network])
    pid = int(connection.recv(64))
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(connection.recv(64) or 1)  # nothing: the server is gone
    if code < 0:  # ended by a signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(*sys.argv[1:])
