"""What an agent says when its node is going to leave."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaving:
    """The node is gone by `leaves_at` (epoch s); `jobs` have ranks on it. `reason` completes "the node leaves: ..."."""

    reason: str
    leaves_at: float
    jobs: tuple[str, ...] = ()
    type: Literal["node_leaving"] = "node_leaving"
