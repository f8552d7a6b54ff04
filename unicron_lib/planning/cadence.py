"""How often a checkpoint pays: J. T. Daly, "A higher order estimate of the optimum checkpoint interval" (2006), eq. 37. Pure.

It refines Young's sqrt(2 c M), c being what a checkpoint costs and M the mean time between failures.
"""

import math

UNMEASURED_S = 60.0
"""Until the first save: what it costs is not known before, and a store that does not work should be found out soon."""
LEAST_S, MOST_S = 30.0, 3600.0
"""A store is not asked more often, whatever pays; and nobody wants to lose more than an hour, however rare failures are."""
SHARE = 0.01
"""Of the time, for copies of the state in host memory, where nobody has said how often."""
LOAD = 0.05
"""Of the time of an upload: what it takes from the training beside it."""
BREATH = 2.0
"""So many times what an upload takes lie at least between two."""


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints that lose the least; `cost_s` and `mtbf_s` are positive."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def pause_s(*, blocking_s: float, upload_s: float, mtbf_s: float) -> float:
    """Seconds between two checkpoints, by what the last one took; 0 s for both: none was measured yet."""
    if not blocking_s + upload_s > 0 or not mtbf_s > 0:
        return UNMEASURED_S
    least = max(LEAST_S, BREATH * upload_s)
    return min(max(daly_s(blocking_s + LOAD * upload_s, mtbf_s), least), max(MOST_S, least))
