"""A rank's process whose all-reduce never ends, and which goes on all the same; `left_behind:main` for the fork server."""

import os
import signal
import threading

import torch

from unicron_lib.training.environment import read_environment
from unicron_lib.training.groups import join, leave
from unicron_lib.training.peers import CollectiveFailed


def main() -> int:
    """Rank 1 stops for ever; rank 0 is told to park while it waits, leaves, and meets others later: itself."""
    env, device, given_up = read_environment(os.environ), torch.device("cpu"), threading.Event()
    meeting = join(env, device, is_given_up=given_up.is_set)
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, given_up.set).start()
    assert is_broken_off(meeting.peers)
    del meeting
    leave()
    given_up.clear()
    os.environ |= {"UNICRON_GENERATION": "2", "WORLD_SIZE": "1"}
    meeting = join(read_environment(os.environ), device, is_given_up=given_up.is_set)
    total = torch.ones(3)
    meeting.peers.sum(total)
    return 0 if total.sum() == 3 else 1


def is_broken_off(peers) -> bool:
    try:
        peers.sum(torch.ones(10))
    except CollectiveFailed as failure:
        return "still waits" in str(failure)
    return False
