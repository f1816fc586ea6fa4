"""The end of a process that has made a context: all ranks synchronize, and close their connections.

A process that ends while gloo's threads still serve its connections may be aborted (SIGABRT). The
launcher then kills the other ranks, which may still be writing.
"""

import atexit
import os
import sys
import time
import weakref
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megazoo.torch_internals import default_store

PATIENCE = 5.0  # seconds that an ending rank waits for the others
LEAVING = 1.0  # seconds that the rank with the store waits for the others to read it


class _Ending:
    """The actions at the end of a process. One instance is registered, in the process that made
    it."""

    def __init__(self, name: str, owns_world: bool):
        self.name, self.owns_world, self.pid = name, owns_world, os.getpid()
        # weak, so that a group ends when a user destroys it
        self.world, self.groups = weakref.ref(dist.group.WORLD), weakref.WeakSet()

    def __call__(self) -> None:
        failed = getattr(sys, "last_value", None) is not None
        if failed or not self.is_current():
            return
        met = False
        with suppress(RuntimeError):  # the store is gone: the others have left
            met = self._meet()
        if "nccl" in dist.get_backend() and not met:
            return  # NCCL would wait for them
        for group in [None] if self.owns_world else list(self.groups):
            with suppress(RuntimeError, ValueError, AssertionError):  # the group is gone
                dist.destroy_process_group(group)

    def is_current(self) -> bool:
        """Return whether this instance was made in the current process and world."""
        world = self.world()
        return os.getpid() == self.pid and world is not None and world is dist.group.WORLD

    def _meet(self) -> bool:
        """Wait up to PATIENCE for all ranks to come here, and return whether they have."""
        store, size = default_store(), dist.get_world_size()
        store.set_timeout(timedelta(seconds=PATIENCE))
        if not _count(store, f"megazoo/{self.name}/ends", size, PATIENCE):
            return False
        if dist.get_rank() == 0:  # it may have the store
            _count(store, f"megazoo/{self.name}/left", size, LEAVING)
        else:
            store.add(f"megazoo/{self.name}/left", 1)
        return True


_latest: _Ending | None = None


def close_at_exit(name: str, owns_world: bool, groups: list) -> None:
    """Close groups at the end of this process, together with the other ranks.

    name: of the context, the same on all ranks. owns_world: whether megazoo initialised
    torch.distributed; otherwise the user must close it.
    """
    global _latest
    if _latest is None or not _latest.is_current():
        if _latest:
            atexit.unregister(_latest)
        _latest = _Ending(name, owns_world)
        atexit.register(_latest)
    _latest.groups.update(groups)


def close() -> None:
    """Close now what would be closed at the end: forked processes end without atexit."""
    if _latest:
        _latest()


def leave() -> None:
    """End this process without waiting for the other ranks, after a reported error."""
    if _latest:
        atexit.unregister(_latest)


def _count(store: dist.Store, key: str, size: int, patience: float) -> bool:
    """Count this rank under a key, and return whether all ranks come within `patience` seconds."""
    until = time.monotonic() + patience
    store.add(key, 1)
    while store.add(key, 0) < size:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
