"""A rank without torch: the iterations of the benches, told to the agent as training ranks tell theirs."""

import os
import time
import traceback

from unicron_lib.agent.beats import BeatWriter
from unicron_lib.agent.rank_messages import RankFailed, RankHello
from unicron_lib.detection.sections import Section
from unicron_lib.training.environment import RankEnvironment, read_environment
from unicron_lib.training.link import AgentLink
from unicron_lib.training.progress_lines import ProgressLines

BENCH = "bench:sleep"
"""As a job's `data_path`: iterations that take `pace_s` and do nothing."""
OWN_SHARE = 0.5
"""Of an iteration: a rank's own part, before it waits for the others as in the gradients' all-reduce."""
RAISED = "raised at "


def raised_at(message: str) -> float:
    """When an injected exception was raised, by the monotonic clock, which all processes of a machine share."""
    return float(message.removeprefix(RAISED))


def main() -> int:
    """Iterate until killed, or asked to fail."""
    env = read_environment(os.environ)
    link, beats = AgentLink(env.agent_socket), BeatWriter.open(env.beat_file)
    link.send(RankHello(job=env.job, generation=env.generation, rank=env.rank, pid=os.getpid()))
    iteration, progress = grid_iteration(env.spec.pace_s), ProgressLines(env, link.send_line)
    try:
        while True:
            _iterate(env, link, beats, progress, iteration + 1)
            iteration += 1
    except RuntimeError as error:
        link.send(_failed(env, iteration, error))
        return 1


def grid_iteration(pace_s: float) -> int:
    """The number of the iteration that is going on now, for all ranks of this machine: they keep step by its clock."""
    return int(time.monotonic() / pace_s)


def _iterate(env: RankEnvironment, link: AgentLink, beats: BeatWriter, progress: ProgressLines, iteration: int) -> None:
    if link.take_fault() == "raise":
        raise RuntimeError(f"{RAISED}{time.monotonic()!r}")
    started, end = time.monotonic(), (iteration + 1) * env.spec.pace_s
    beats.mark(Section.STEP)
    time.sleep(env.spec.pace_s * OWN_SHARE * link.slowness)
    computed = time.monotonic()
    beats.mark(Section.COLLECTIVE)
    time.sleep(max(0.0, end - computed))
    iteration_s = time.monotonic() - started
    beats.complete(iteration, iteration_s)
    progress.tell(iteration, loss=1.0, iteration_s=iteration_s, flops=1e9 / iteration_s, compute_s=computed - started)


def _failed(env: RankEnvironment, iteration: int, error: Exception) -> RankFailed:
    return RankFailed(
        job=env.job,
        generation=env.generation,
        rank=env.rank,
        iteration=iteration,
        error_type=type(error).__name__,
        message=str(error),
        traceback=traceback.format_exc(),
        parked=False,
    )
