"""A rank that says the same over and over is heard once, and again at each power of ten. Pure."""

from dataclasses import replace

from unicron_lib.agent.rank_messages import RankFailed

MOST_TOLD = 64
"""Failures of one rank that differ and are told one by one, and types of error that are: the others are counted."""


class Repeats:
    """What one rank of one generation has said about its failures, and how often."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._types: set[str] = set()
        self._num_untold = 0

    def news(self, failure: RankFailed) -> RankFailed | None:
        """The failure if it has not been heard before; with its count at the 10th, 100th, ... time; None otherwise.

        Of more than `MOST_TOLD` that differ, the first of each type of error is told, and of the rest how many there are.
        """
        key = hash(failure)
        if key in self._counts:
            self._counts[key] += 1
            return _counted(failure, self._counts[key], "said {} times so far")
        is_new_type = failure.error_type not in self._types and len(self._types) < MOST_TOLD
        if len(self._counts) < MOST_TOLD or is_new_type:
            self._counts[key] = 1
            self._types.add(failure.error_type)
            return failure
        self._num_untold += 1
        return _counted(failure, self._num_untold, "one of {} beyond the first " + f"{MOST_TOLD}, which are counted only")


def _counted(failure: RankFailed, count: int, words: str) -> RankFailed | None:
    is_power_of_ten = str(count).rstrip("0") == "1"
    return replace(failure, message=f"{failure.message}\n[{words.format(count)}]") if is_power_of_ten else None
