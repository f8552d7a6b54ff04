"""A rank's process that forms one group after another and counts what it holds; `reformation:main` for the fork server."""

import json
import os
import threading
from collections import Counter
from pathlib import Path

import torch

from unicron_lib.training.abort import break_connections
from unicron_lib.training.environment import read_environment
from unicron_lib.training.groups import finish_own_work, join, leave
from unicron_lib.training.peers import CollectiveFailed
from unicron_lib.training.replica import MicroBatch, Replica

ROUNDS = 50
FIRST = 3
"""Until then, what is made once and kept may come: thread pools, caches."""


def main() -> int:
    """Write what was held after some rounds and at the end to the file that REFORMATION_OUT names."""
    env = read_environment(os.environ)
    device = torch.device("cpu")
    torch.set_num_threads(1)
    replica = Replica(env.spec, device)
    held = []
    for number in range(ROUNDS):
        os.environ["UNICRON_GENERATION"] = str(number + 1)
        failure = one_round(read_environment(os.environ), device, replica, number)
        leave()
        assert failure == ("broken" if number % 2 else ""), (number, failure)
        if number in {FIRST, ROUNDS - 1}:
            held.append(holdings())
    Path(os.environ["REFORMATION_OUT"]).write_text(json.dumps(held))
    return 0


def one_round(env, device, replica: Replica, number: int) -> str:
    """Every other group is broken while a rank waits in it."""
    try:
        meeting = join(env, device)
        replica.begin()
        tokens = torch.zeros(1, env.spec.seq_length + 1, dtype=torch.int64)
        replica.add_micro_batch(MicroBatch(number=0, iteration=number, first=0, samples=[0], tokens=tokens))
        meeting.peers.sum(replica.buckets[0])
        assert meeting.peers.exchange(b"%d" % env.rank) == [b"0", b"1"]
        finish_own_work(device)
        if number % 2 and env.rank:
            breaking = threading.Timer(0.01, break_connections)
            breaking.start()
            try:
                meeting.bulletin.read("never", timeout_s=20.0)
            finally:
                breaking.join()  # or it would break the next group
        elif number % 2:
            meeting.peers.sum(replica.buckets[0])
    except CollectiveFailed:
        return "broken"
    return ""


def holdings() -> dict[str, int]:
    descriptors = Counter(
        str(entry.readlink()).partition(":")[0] for entry in Path("/proc/self/fd").iterdir() if entry.exists()
    )
    return {"threads": len(list(Path("/proc/self/task").iterdir())), "descriptors": descriptors.total(), **descriptors}
