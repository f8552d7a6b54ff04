"""Automatic restarts from checkpoints, with the nodes that are left: from the object store, and from memory (GEMINI).

Both find out when the collective times out and set the environment up as Megatron's users do; nobody has to submit
anything. They differ in nothing but where the checkpoint is and how old, so that the worth of GEMINI's idea is seen alone.
"""

from dataclasses import dataclass

from unicron_lib.planning.transition_cost import DEFAULT
from unicron_lib.simulation.durations import undetected_s
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.habits import EachByItself, Phases
from unicron_lib.simulation.megatron import PATH
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Automatic:
    """A job is started again by itself, from a checkpoint in memory of each iteration or from one in the store."""

    name: str
    in_memory: bool
    waits: bool = False
    takes_spares: bool = True
    fitted: tuple[str, ...] = ()

    def efficiency(self, job: SimJob) -> float:  # noqa: ARG002 the habit's interface
        """Checkpoints go out between the iterations' own traffic."""
        return 1.0

    def finding_out(self, fault: Fault, job: SimJob, cluster: SimCluster) -> Phases:  # noqa: ARG002 the habit's interface
        """The time-out."""
        return ((Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION, undetected_s(fault.kind, cluster)),)

    def restarting(self, fault: Fault, job: SimJob, cluster: SimCluster, *, at_s: float) -> Phases:  # noqa: ARG002
        """Environment, state, and half of what lies between two checkpoints."""
        bandwidth = DEFAULT.peer_memory if self.in_memory else DEFAULT.store
        return (
            (Use.PROGRAM_STARTUP, PATH.environment_s),
            (Use.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME, job.state_bytes / bandwidth),
            (Use.WASTED_PROGRESS_FROM_DISRUPTION, (job.iteration_s if self.in_memory else job.checkpoint_s) / 2),
        )

    def growing(self, job: SimJob) -> Phases:
        """A restart of a healthy job: nothing is lost."""
        bandwidth = DEFAULT.peer_memory if self.in_memory else DEFAULT.store
        return ((Use.ELASTIC_SCALE_UP, PATH.environment_s + job.state_bytes / bandwidth),)


GEMINI = EachByItself(habit=Automatic(name="gemini", in_memory=True))
CHECKPOINT_ONLY = EachByItself(habit=Automatic(name="checkpoint-only", in_memory=False))
