"""End ranks whose launcher has died. This module does not import torch."""

import ctypes
import os
import signal
import sys

from megazoo.environment import is_child_of_launcher


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this process when its launcher dies, even of SIGKILL.

    So no rank continues without a launcher. It does nothing without a launcher or on systems other
    than Linux.
    """
    if not is_child_of_launcher() or sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, ctypes.c_ulong(signal.SIGTERM))
    if _is_orphan():  # the launcher died before the request to the kernel
        os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan() -> bool:
    """Return whether this rank's launcher has died. This is a guess from the parent of this
    process."""
    if os.getppid() != 1:
        return False
    # The parent of an orphan is process 1. In a container, that may be the launcher, which is a
    # Python program.
    try:
        return "python" not in os.readlink("/proc/1/exe")
    except OSError as error:
        return isinstance(error, PermissionError)  # the process of another user
