"""The key `outlook` of a scenario: when lost nodes are back, what nodes cost, and what to do about a loss therefore."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from unicron_lib.domain.plans import Alternative
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.alternatives import Loss, Outlook, compare
from unicron_lib.planning.pools import no_solver
from unicron_lib.planning.waf import Demand

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NodeOutlook(BaseModel):
    """Times in seconds and prices in dollars, as of `Outlook`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repair_s: Figure
    replace_s: Figure
    node_dollars_per_h: Figure = 0.0
    replacement_dollars_per_h: Figure | None = None
    dollars_per_eflop: Figure | None = None


def weighed(
    keys: NodeOutlook, loss: Loss, *, timer: Callable[[], float], time_limit_s: float = 10.0
) -> tuple[Alternative, ...]:
    """The alternatives of a scenario's loss, by the dynamic programme: there are up to twenty allocations to solve."""

    def share(request: Request) -> Allocation:
        return allocate(request, timer=timer, time_limit_s=time_limit_s, solve=no_solver)

    return compare(loss, Outlook(**keys.model_dump()), share=share)


def loss_of(demands: Sequence[Demand], *, num_nodes: int, lost_nodes: int, gpus_per_node: int, mtbf_gpu_s: float) -> Loss:
    """The loss of `lost_nodes` of `num_nodes` equal nodes."""
    left = num_nodes - lost_nodes
    return Loss(
        demands=tuple(demands),
        num_gpus=left * gpus_per_node,
        lost_gpus=lost_nodes * gpus_per_node,
        num_nodes=left,
        lost_nodes=lost_nodes,
        mtbf_gpu_s=mtbf_gpu_s,
    )


def as_json(alternatives: Sequence[Alternative]) -> list[dict[str, Any]]:
    """As `unicron plan --json` prints them."""
    return [
        {
            "kind": str(it.kind),
            "gpus": dict(it.gpus),
            "flop": it.flop,
            "dollars": it.dollars,
            "value_dollars": it.value_dollars,
            "best": it.best,
            "reason": it.reason,
        }
        for it in alternatives
    ]
