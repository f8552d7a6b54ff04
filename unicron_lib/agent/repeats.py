"""A rank that says the same over and over is heard once, and again at each power of ten. Pure."""

from collections import OrderedDict
from dataclasses import replace

from unicron_lib.agent.rank_messages import RankFailed

MEMORY = 1024
"""Different failures of a rank that are remembered; one that was forgotten is news again."""


class Repeats:
    """What one rank has said about its failures, and how often."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, int] = OrderedDict()

    def news(self, failure: RankFailed) -> RankFailed | None:
        """The failure if it has not been heard before; with its count at the 10th, 100th, ... time; None otherwise."""
        key = hash(failure)
        count = self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > MEMORY:
            self._counts.popitem(last=False)
        if count == 1:
            return failure
        is_power_of_ten = str(count).rstrip("0") == "1"
        return replace(failure, message=f"{failure.message}\n[said {count} times so far]") if is_power_of_ten else None
