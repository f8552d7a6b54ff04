"""What published formulas say without a simulation: the yardsticks that simulated figures are held against.

RSC is Meta's study of two research clusters (arXiv 2410.21680), Acme that of Shanghai AI Laboratory's (arXiv 2403.07648).
"""

from dataclasses import dataclass
from math import log, sqrt

from unicron_lib.errors import UserError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

RSC1_FAILURES = 6.5
"""Failures of RSC-1 in 1,000 node-days, the rate that its projections are made with."""


def mttf_s(num_gpus: int, failures_in_1000_node_days: float = RSC1_FAILURES, gpus_per_node: int = 8) -> float:
    """Seconds between failures of a job on `num_gpus` GPUs: `1 / (N_nodes * r_f)` of RSC."""
    return 1000 * DAY_S / (num_gpus / gpus_per_node * failures_in_1000_node_days)


def best_interval_s(write_s: float, mttf_s: float) -> float:
    """Seconds between checkpoints that lose least, if writing one stops the training for `write_s`: `sqrt(2 * w_cp * MTTF)`."""
    return sqrt(2 * write_s * mttf_s)


def expected_ettr(*, mttf_s: float, restart_s: float, interval_s: float, write_s: float) -> float:
    """E[ETTR] of RSC: the share of its time in which a job makes progress that lasts.

    `restart_s` is what a failure costs before the first iteration (u0), half an `interval_s` is done again. A first-order
    form: it is meant for failures much rarer than `restart_s + interval_s / 2`, and is 0.0 where they are not.
    """
    lost = (restart_s + interval_s / 2) / mttf_s
    return max(0.0, 1 - lost) / (1 + write_s / interval_s)


def lognormal_sigma(mean: float, median: float) -> float:
    """Sigma of the log-normal distribution with that mean and median, as Acme's times are.

    Raises UserError for a mean below the median, which no log-normal distribution has.
    """
    if not 0 < median <= mean:
        raise UserError(
            f"a log-normal distribution needs 0 < median <= mean, got a mean of {mean:g} and a median of {median:g}"
        )
    return sqrt(2 * log(mean / median))


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualRestart:
    """What a failure costs where people restart by hand (Unicron's section 2), in seconds.

    The collective's time-out, the new submission, the environment with CUDA, and half a checkpoint interval to do again.
    """

    timeout_s: float = 1800.0
    resubmission_s: float = 540.0
    environment_s: float = 840.0
    checkpoint_s: float = 1800.0

    @property
    def redo_s(self) -> float:
        """What is computed again on average."""
        return self.checkpoint_s / 2

    @property
    def total_s(self) -> float:
        """All of it: 68 minutes by default."""
        return self.timeout_s + self.resubmission_s + self.environment_s + self.redo_s
