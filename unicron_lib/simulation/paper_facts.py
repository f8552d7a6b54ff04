"""The published figures that need no simulation: mixes, paths, closed forms, each beside what our code makes of it."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from unicron_lib.domain.failures import DEFAULT_SEVERITY, DetectionMethod
from unicron_lib.simulation import closed_forms, oobleck_artifact
from unicron_lib.simulation.closed_forms import HOUR_S
from unicron_lib.simulation.durations import PAPER, detection_s, method_of, undetected_s
from unicron_lib.simulation.generators import DAY_S, FIGURE_1, Hazard, generated
from unicron_lib.simulation.tables import Table
from unicron_lib.simulation.workload import SimCluster

DRAWN_DAYS = 400.0


METHODS: Mapping[DetectionMethod, tuple[str, str]] = MappingProxyType(
    {
        DetectionMethod.NODE_HEALTH: ("5.6 s", "5.7 s"),
        DetectionMethod.PROCESS: ("1.8 s", "30 min"),
        DetectionMethod.EXCEPTION: ("0.3 s", "30 min"),
        DetectionMethod.STATISTICS: ("3 x D_iter", "30 min"),
    }
)
"""Published times of detection with and without Unicron; recalled, not checked."""


def figure_1() -> Table:
    """Why tasks end abnormally: the published mix, and that of a generated trace."""
    made = generated(Hazard(per_node_day=1.0), 0, num_nodes=100, duration_s=DRAWN_DAYS * DAY_S)
    drawn = Counter(fault.kind for fault in made.faults)
    total = sum(FIGURE_1.values())
    rows = tuple(
        (str(kind), f"SEV{int(DEFAULT_SEVERITY[kind])}", share, 100 * share / total, 100 * drawn[kind] / len(made.faults))
        for kind, share in sorted(FIGURE_1.items(), key=lambda it: -it[1])
    )
    return Table(
        name="figure-1",
        title="Why tasks end abnormally (Figure 1 of the Unicron paper)",
        columns=(
            "kind",
            "severity",
            "% of all tasks, published",
            "% of the failures, published",
            "% of the failures, generated",
        ),
        rows=rows,
        notes=(
            f"The generated ones are {len(made.faults)} faults of seed 0: the mix is an input of the generator.",
            f"In all {total:.1f}% of the tasks end so; the severity of `other` is ours.",
        ),
    )


def detection() -> Table:
    """What finds failures, and when."""
    iteration_s, cluster = 10.0, SimCluster(num_nodes=16)
    kinds = sorted(FIGURE_1)
    rows = []
    for method, (with_it, without) in METHODS.items():
        own = [kind for kind in DEFAULT_SEVERITY if method_of(kind) is method]
        told = [str(kind) for kind in own if kind in kinds] or [str(own[0])]
        simulated = detection_s(own[0], iteration_s, PAPER), undetected_s(own[0], cluster)
        rows.append((str(method), ", ".join(sorted(told)), with_it, *simulated[:1], without, *simulated[1:]))
    return Table(
        name="detection",
        title="Detection times",
        columns=("method", "kinds", "with Unicron, published", "simulated, s", "without, published", "simulated, s"),
        rows=tuple(rows),
        notes=(
            f"The simulated times are inputs, with iterations of {iteration_s:g} s: the paper's, not results of ours.",
            "What this code really takes is measured by `unicron bench detection`.",
        ),
    )


def rsc() -> Table:
    """The closed forms of RSC, at its sizes and beyond."""
    restart_s, write_s = 300.0, 60.0
    published = {16_384: 1.80, 131_072: 0.225}
    rows = []
    for num_gpus in (1_024, 4_096, 16_384, 100_000, 131_072):
        between_s = closed_forms.mttf_s(num_gpus)
        interval_s = closed_forms.best_interval_s(write_s, between_s)
        ettr = closed_forms.expected_ettr(mttf_s=between_s, restart_s=restart_s, interval_s=interval_s, write_s=write_s)
        rows.append((num_gpus, published.get(num_gpus), between_s / HOUR_S, interval_s / 60, ettr))
    return Table(
        name="rsc",
        title="Closed forms of RSC: time between failures, best checkpoint interval, E[ETTR]",
        columns=("GPUs", "MTTF published, h", "MTTF computed, h", "best interval, min", "E[ETTR]"),
        rows=tuple(rows),
        notes=(
            f"{closed_forms.RSC1_FAILURES:g} failures in 1,000 node-days (RSC-1), nodes of 8 GPUs.",
            f"E[ETTR] with a restart of {restart_s:g} s and a blocking checkpoint of {write_s:g} s: our choice.",
        ),
    )


def oobleck() -> Table:
    """The published averages of Oobleck's artifact, and those that our model of it reaches."""
    rows = []
    for (model, system), published in oobleck_artifact.PUBLISHED.items():
        ours = oobleck_artifact.average(model, system, oobleck_artifact.trace())
        rows.append((model, system, published, ours, ours / published))
    return Table(
        name="oobleck-artifact",
        title="Oobleck's artifact: samples a second, 30 nodes down to 15, one lost in 10 minutes",
        columns=("model", "system", "published", "ours", "ours / published"),
        rows=tuple(rows),
        notes=(
            "The rules, the trace and the tables of throughput are the artifact's, the code is ours. Nothing is fitted.",
            "Bamboo has no throughput for GPT-3 6.7B there: it runs out of memory.",
        ),
    )
