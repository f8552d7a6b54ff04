"""The sum of the gradients over the ranks, bucket by bucket, such that a rank that is lost on the way costs no work."""

from collections.abc import Callable

from unicron_lib.training.effort import Effort
from unicron_lib.training.peers import Peers
from unicron_lib.training.replica import Replica


def sum_buckets(
    replica: Replica, peers: Peers, effort: Effort, *, generation: int, poll: Callable[[], None] = lambda: None
) -> None:
    """Sum the buckets that are not final yet; `poll` is called before each of them, and may raise.

    Raises CollectiveFailed. What the buckets held before, those that are not summed yet hold then as well.
    """
    for number, bucket in enumerate(replica.buckets):
        if number in effort.reduced:
            continue
        poll()
        backup = replica.spare[: len(bucket)]
        backup.copy_(bucket)
        try:
            peers.sum(bucket)
        except BaseException:
            bucket.copy_(backup)
            raise
        effort.reduced[number] = generation
