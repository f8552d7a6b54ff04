"""Megatron as people run it: a collective times out, somebody submits the job again, it restarts from its checkpoint.

By default a job whose node is lost waits for that node. The paper's ratios need this reading; it is fitted, not published.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_lib.simulation.allocation_rules import Allocation, Rule, best
from unicron_lib.simulation.closed_forms import ManualRestart
from unicron_lib.simulation.durations import undetected_s
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.habits import EachByItself, Phases
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

PATH = ManualRestart()
"""68 minutes: 30 + 9 + 14 + 15 (the paper, section 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """Restarted by hand. The time-out is the cluster's; half of the job's own checkpoint interval is done again."""

    name: str = "megatron"
    waits: bool = True
    takes_spares: bool = False
    fitted: tuple[str, ...] = ("jobs wait for the repair of their node",)

    def efficiency(self, job: SimJob) -> float:  # noqa: ARG002 the habit's interface
        """It is the measure of the others."""
        return 1.0

    def finding_out(self, fault: Fault, job: SimJob, cluster: SimCluster) -> Phases:  # noqa: ARG002 the habit's interface
        """The time-out, and somebody's time to submit the job again."""
        use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
        return ((use, undetected_s(fault.kind, cluster)), (use, PATH.resubmission_s))

    def restarting(self, fault: Fault, job: SimJob, cluster: SimCluster, *, at_s: float) -> Phases:  # noqa: ARG002
        """Environment, CUDA, and what had been done since the checkpoint."""
        return ((Use.PROGRAM_STARTUP, PATH.environment_s), (Use.WASTED_PROGRESS_FROM_DISRUPTION, job.checkpoint_s / 2))

    def growing(self, job: SimJob) -> Phases:  # noqa: ARG002 the habit's interface
        """Stopped at a checkpoint and started with more GPUs: nothing is lost."""
        return ((Use.ELASTIC_SCALE_UP, PATH.environment_s),)


def with_spares(share: Rule, num_gpus: int) -> Rule:
    """`share` of a cluster in which `num_gpus` GPUs are kept free."""

    def rest(jobs: Sequence[SimJob], of_gpus: int) -> Allocation:
        return share(jobs, max(0, of_gpus - num_gpus))

    return rest


MEGATRON = EachByItself(habit=Megatron())
SHRINKING = EachByItself(habit=Megatron(name="megatron-shrink", waits=False, fitted=()))


def with_spare_nodes(num_nodes: int, gpus_per_node: int) -> EachByItself:
    """Jobs move to a spare node if there is one, else they wait for theirs."""
    habit = Megatron(name="megatron-spare", takes_spares=True)
    return EachByItself(habit=habit, share=with_spares(best, num_nodes * gpus_per_node))
