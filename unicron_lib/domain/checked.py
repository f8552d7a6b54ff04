"""What a node check leaves in the journal: which nodes have passed, and that a launch waits for none any more."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesChecked:
    """These nodes have passed a node check, each in that life of its agent."""

    id: str
    at: float
    passed: Mapping[str, str]
    type: Literal["nodes_checked"] = "nodes_checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChecked:
    """The check before the first start of `jobs` is over, or was given up: what it has `told`. Their incidents wait no more."""

    id: str
    at: float
    incidents: tuple[str, ...]
    jobs: tuple[str, ...]
    told: str
    type: Literal["launch_checked"] = "launch_checked"


Checked = NodesChecked | LaunchChecked
