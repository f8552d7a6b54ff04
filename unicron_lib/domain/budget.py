"""How often a job may fail: without a new iteration in between, and within a window of time."""

from dataclasses import replace

from unicron_lib.domain.failures import ErrorKind, Failure
from unicron_lib.domain.jobs import JobState


def failed(job: JobState, failure: Failure, *, counts: bool) -> JobState:
    """The job after a failure; it `counts` as an attempt unless it is one more trace of what has been seen already."""
    last = job.failed_at
    reached = last if failure.iteration is None else max(failure.iteration, -1 if last is None else last)
    if last is None or not counts:
        return replace(job, failed_at=-1 if reached is None else reached)
    progressed = (failure.iteration is not None and failure.iteration > last) or _held_out(job, failure, reached)
    return replace(job, failed_at=reached, stuck_restarts=0 if progressed else job.stuck_restarts + 1)


def _held_out(job: JobState, failure: Failure, reached: int | None) -> bool:
    """Whether a command that tells of no iterations has run for its whole window since it failed last: that is progress."""
    window_s = job.spec.restart_window_s
    is_mute = bool(job.spec.command) and (reached is None or reached < 0)
    return is_mute and window_s > 0 and not any(0 <= failure.seen_at - time < window_s for time in job.failed_times)


def forgiven(job: JobState) -> JobState:
    """The job after its last failure turned out to be none, or a node's."""
    return replace(job, stuck_restarts=max(0, job.stuck_restarts - 1))


def answered(job: JobState, root: Failure, at: float) -> JobState:
    """The job after a plan answered a failure of its own; what a scheduler wants, or a node suffers, never counts."""
    if root.job != job.spec.job or root.kind is ErrorKind.PREEMPTED:
        return job
    window_s = job.spec.restart_window_s
    recent = (*(time for time in job.failed_times if 0 <= at - time < window_s), at)
    return replace(job, failed_times=recent[-job.spec.max_restarts - 1 :] if window_s else ())


def spent(job: JobState, now: float) -> str | None:
    """Why the job must not be started again after one more failure at `now`; None if it may be."""
    most, window_s, stuck = job.spec.max_restarts, job.spec.restart_window_s, job.stuck_restarts
    if stuck > most:
        return f"{stuck} failures in a row without a new iteration, max_restarts is {most}"
    recent = 1 + sum(0 <= now - time < window_s for time in job.failed_times)
    if not window_s or recent <= most:
        return None
    still = f", {stuck} of them without a new iteration" if stuck else ""
    return f"{recent} failures within {window_s:g} s{still}, max_restarts is {most}"
