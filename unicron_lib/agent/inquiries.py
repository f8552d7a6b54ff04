"""What the control host wants to know of a node: commands that change nothing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLog:
    """Send the end of a rank's log, of whatever generation. Result: `file`, `first_line`, `packed`, as of `Tail`."""

    step: str
    job: str
    generation: int
    rank: int
    type: Literal["read_log"] = "read_log"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNode:
    """Test the node's devices and exchange data with the other `world_size - 1` members of a meeting, within `deadline_s`.

    Refused while ranks live here, and given up when some are launched. The meeting's store is that of `job` and `generation`.
    Result: `exchanged`, `gather_s`, `compute_s`, `error`, and `faults`, a list of `{device, test, text}`.
    """

    step: str
    job: str
    generation: int
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    deadline_s: float
    type: Literal["check_node"] = "check_node"
