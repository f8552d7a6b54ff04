"""Has the controller gone blind? Many nodes do not die at the same moment, but one host loses its network. Pure."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter

from unicron_lib.controller.liveness import DEFAULT_PATIENCE, GOODBYE, Contact

BLIND_S = 60.0
"""How long more than half of the nodes, silent since the same moment, are not judged: ours, longer than a switch's restart."""
QUIET_S = 2.0
"""Two missed heartbeats: earlier than any silent node is suspect. One whose connection has ended is counted at once."""
AT_ONCE_S = DEFAULT_PATIENCE.suspect_after_s
"""Nodes whose last words came within so long have fallen silent together."""
REDIAL_S = 15.0
"""How long an agent may need to dial again once the network is back: it gives a dead connection up after 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """`num_silent` of `num_nodes` nodes fell silent together, `first` before the others, at `since` (monotonic seconds)."""

    first: str
    since: float
    num_silent: int
    num_nodes: int

    @property
    def text(self) -> str:
        """What a person is told."""
        return f"{self.num_silent} of {self.num_nodes} nodes fell silent within {AT_ONCE_S:g} s: the controller may be blind"


class Sight:
    """Which silent nodes are not to be judged, because it is the controller that does not see. At least 2 nodes are needed.

    That ends `blind_s` after the first of them fell silent, and `REDIAL_S` after half of the nodes can be heard again.
    """

    def __init__(self, *, blind_s: float = BLIND_S) -> None:
        self._blind_s = blind_s
        self._judged_at = float("-inf")
        self._heard_again_at: float | None = None
        self._quiet: frozenset[str] = frozenset()
        self.outage: Outage | None = None

    def look(self, now: float, nodes: Mapping[str, Contact]) -> None:
        """Take in what is known of all nodes that are not lost; to be done several times a second."""
        quiet = {name: contact for name, contact in nodes.items() if _is_quiet(now, contact)}
        self._quiet = frozenset(quiet)
        if self.outage is None:
            self.outage = self._new_outage(now, quiet, len(nodes) - len(quiet))
            self._heard_again_at = None
        elif not quiet or now >= self._end_of(self.outage):
            self.outage, self._judged_at = None, now
        elif 2 * len(quiet) > len(nodes):
            self._heard_again_at = None
        elif self._heard_again_at is None:
            self._heard_again_at = now

    def excuses(self, node: str) -> str:
        """Why `node`, which would be lost otherwise, is not to be judged now; empty if it is."""
        return self.outage.text if self.outage and node in self._quiet else ""

    def _end_of(self, outage: Outage) -> float:
        end = outage.since + self._blind_s
        return end if self._heard_again_at is None else min(end, self._heard_again_at + REDIAL_S)

    def _new_outage(self, now: float, quiet: Mapping[str, Contact], num_heard: int) -> Outage | None:
        """What more than half of the nodes that could be heard a moment ago tell by falling silent together."""
        start = max(self._judged_at, now - self._blind_s)
        silent = sorted((contact.heard_at, name) for name, contact in quiet.items() if contact.heard_at > start)
        for number, (since, first) in enumerate(silent):
            count = bisect_right(silent, since + AT_ONCE_S, key=itemgetter(0)) - number
            if count >= 2 and count > num_heard:
                return Outage(first=first, since=since, num_silent=count, num_nodes=count + num_heard)
        return None


def _is_quiet(now: float, contact: Contact) -> bool:
    """Whether nothing is heard of the node. One that said goodbye was heard well."""
    has_ended = contact.ended_at is not None
    return contact.ending != GOODBYE if has_ended else now - contact.heard_at >= QUIET_S
