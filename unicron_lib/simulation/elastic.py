"""Resilient trainers: a job goes on with the nodes it has left after a reconfiguration, at a price in failure-free speed.

Their times for a reconfiguration come from Oobleck's published artifact, for three models. Their failure-free efficiency is
fitted to the ratios that the Unicron paper reports: agreement with those ratios is no evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from unicron_lib.simulation.durations import undetected_s
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.habits import Phases
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

GPT2, GPT3_2_7B, GPT3_6_7B = 1.5e9, 2.7e9, 6.7e9
"""Parameters of the models that the artifact has times for. That of its GPT-2 is recalled, not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """A resilient trainer.

    `reconfiguration_s` by the model's parameters; `wait_s` passes before it begins; `redo_iterations` are done again.
    `failure_free` is the throughput without failures relative to Megatron's.
    """

    name: str
    failure_free: float
    reconfiguration_s: Mapping[float, float]
    wait_s: float = 0.0
    redo_iterations: float = 0.5
    waits: bool = False
    takes_spares: bool = True

    @property
    def fitted(self) -> tuple[str, ...]:
        """Its speed."""
        return (f"failure-free efficiency {self.failure_free:g} of Megatron's",)

    def efficiency(self, job: SimJob) -> float:  # noqa: ARG002 the habit's interface
        """Whatever it costs to be ready for failures."""
        return self.failure_free

    def finding_out(self, fault: Fault, job: SimJob, cluster: SimCluster) -> Phases:  # noqa: ARG002 the habit's interface
        """The paper's times without in-band detection."""
        return ((Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION, undetected_s(fault.kind, cluster) + self.wait_s),)

    def restarting(self, fault: Fault, job: SimJob, cluster: SimCluster, *, at_s: float) -> Phases:  # noqa: ARG002
        """The reconfiguration, and what was lost."""
        lost_s = self.redo_iterations * job.iteration_s
        return (
            (Use.ELASTIC_REINITIALIZATION, by_size(self.reconfiguration_s, job.num_params)),
            (Use.WASTED_PROGRESS_FROM_DISRUPTION, lost_s),
        )

    def growing(self, job: SimJob) -> Phases:
        """A reconfiguration of a healthy job."""
        return ((Use.ELASTIC_SCALE_UP, by_size(self.reconfiguration_s, job.num_params)),)


def by_size(seconds: Mapping[float, float], num_params: float) -> float:
    """Seconds for a model: straight lines between the known ones, in proportion to the parameters beyond them."""
    known = sorted(seconds.items())
    (smallest, least), (largest, most) = known[0], known[-1]
    if num_params <= smallest:
        return least * num_params / smallest
    if num_params >= largest:
        return most * num_params / largest
    low, high = next(pair for pair in pairwise(known) if num_params <= pair[1][0])
    return low[1] + (high[1] - low[1]) * (num_params - low[0]) / (high[0] - low[0])
