"""What a loss that went wrong calls for, or results that are wrong: an earlier checkpoint. Pure.

It is gone on from without the batches that did it, but for wrong results with the same ones.
"""

from collections.abc import Iterable
from dataclasses import replace

from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.failures import ErrorKind, Failure
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.plans import Rewind
from unicron_lib.domain.skipping import leaving_out, places, told


def rewinds(state: ClusterState, incidents: Iterable[Incident]) -> dict[str, Rewind]:
    """The jobs that have to go back because of what `incidents` tell, and how far."""
    failures = [failure for incident in incidents for failure in incident.failures]
    found = {job.spec.job: _rewind(job, failures) for job in state.jobs.values()}
    return {name: rewind for name, rewind in found.items() if rewind}


def answer_to(job: JobState, failures: Iterable[Failure]) -> str:
    """What is done about it, for the reason of a plan; empty if nothing among the failures makes the job go back."""
    rewind = _rewind(job, failures)
    if rewind is None:
        return ""
    if rewind.repeats:
        return (
            f"back to a checkpoint from before iteration {rewind.first}, since the results up to iteration {rewind.last} "
            "cannot be trusted; their batches are computed again"
        )
    batches = told(leaving_out(job.skipped, first=rewind.first, last=rewind.last)[-1:])
    return (
        f"back to a checkpoint from before iteration {rewind.first}, "
        f"and what was consumed up to iteration {rewind.last} (batches {batches}) is left out"
    )


def reason_to_give_up(job: JobState, failures: Iterable[Failure]) -> str | None:
    """Why leaving batches out once more would be no help; None if it may be."""
    rewind = _rewind(job, failures)
    if rewind is None or rewind.repeats:
        return None
    reach = job.spec.loss_spike_patience_iters
    again = [known for place, known in zip(places(job.skipped), job.skipped, strict=True) if abs(place - rewind.first) <= reach]
    if not again:
        return None
    return (
        f"the loss went wrong a second time at the same place, in iteration {rewind.first}, although the batches "
        f"{told((*again,))} are left out there: it is not the data. Look at the learning rate, the precision and the hardware"
    )


def rewound(job: JobState, rewind: Rewind) -> JobState:
    """The job from now on, in a generation that nobody has seen harm of; that it gets as far as before is no progress."""
    target = rewind.first - 1
    failed_at = None if job.failed_at is None else min(job.failed_at, target)
    skipped = job.skipped if rewind.repeats else leaving_out(job.skipped, first=rewind.first, last=rewind.last)
    return replace(job, skipped=skipped, rolled_back_to=target, failed_at=failed_at, went_back_in=job.generation)


def _rewind(job: JobState, failures: Iterable[Failure]) -> Rewind | None:
    """Only what was seen since the job went back last counts: before, it consumed other batches, and that was answered.

    Where it was moved for another reason meanwhile, it goes on from the harm. Where results are wrong, so is the loss, and no
    batch is to blame.
    """
    since = max(job.begins_with, job.went_back_in)
    grounds = [
        failure
        for failure in failures
        if failure.spoiled and failure.job == job.spec.job and failure.generation in range(since, job.generation + 1)
        if job.spec.guards_loss or failure.kind is not ErrorKind.LOSS_ANOMALY
    ]
    spoiled = [failure.spoiled for failure in grounds if failure.spoiled]
    if not spoiled:
        return None
    return Rewind(
        first=min(first for first, _ in spoiled),
        last=max(last for _, last in spoiled),
        repeats=any(failure.kind is not ErrorKind.LOSS_ANOMALY for failure in grounds),
    )
