"""The names by which processes are known to be an agent's, in the environment that the kernel shows of them."""

import ctypes
import os

AGENT, NODE, OWNER, RUN_DIR = "UNICRON_AGENT", "UNICRON_NODE", "UNICRON_OWNER", "UNICRON_RUN_DIR"
BLANK_OWNER = " " * 40
"""Room for the owner's name, which is written over it."""


def own_descendants(owner: str) -> None:
    """Have this process and all that descend from it name `owner`, also those that only fork.

    The kernel shows the environment that a program was started with, in the program's own memory: there the name is
    written. Does nothing in a process that was not started with BLANK_OWNER.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(OWNER.encode())
    if place is not None and os.environ.get(OWNER) == BLANK_OWNER:
        name = owner.ljust(len(BLANK_OWNER)).encode()
        assert len(name) == len(BLANK_OWNER), owner
        ctypes.memmove(place, name, len(name))
        os.environ[OWNER] = name.decode()
