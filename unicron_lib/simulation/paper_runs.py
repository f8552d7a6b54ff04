"""The published figures that are simulated, each beside what was published, and what lies beyond the papers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.planning.transition_cost import DEFAULT
from unicron_lib.simulation import cases, scenes
from unicron_lib.simulation.baselines import BASELINES, PAPER
from unicron_lib.simulation.comparison import Comparison, Mean
from unicron_lib.simulation.durations import LINKS, Transition
from unicron_lib.simulation.engine import simulate
from unicron_lib.simulation.faults import Fault, Trace
from unicron_lib.simulation.generators import DAY_S
from unicron_lib.simulation.ledger import Segment
from unicron_lib.simulation.policy import Policy
from unicron_lib.simulation.scenes import Asked, Scene, build, compared
from unicron_lib.simulation.tables import Cell, Table
from unicron_lib.simulation.unicron import Unicron
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster

FLEET_GPUS = (1_024, 4_096, 16_384, 65_536, 100_000)
FLEET_DAYS = 30.0
RULES = ("equally", "weighted", "sized")
SIZES: Mapping[str, tuple[int, ...]] = MappingProxyType({"7b": (16, 32, 64, 128), "70b": (40, 64, 128)})

Done = Callable[[], None]


def ratios(name: str, found: Comparison, scene: Scene) -> Table:
    """Accumulated WAF of Unicron over that of each other policy; `name` is the table's."""
    rows = []
    for policy, result in found.results.items():
        times = found.times(policy)
        ettr = sum(books.cluster.ettr for books in result.books.values()) / len(result.books)
        rows.append((policy, found.published.get(policy), *_cells(times), ettr, "; ".join(result.fitted)))
    below = [f"Below {run.policy} on seed {run.seed} by {run.surplus_flop:.3g} FLOP: {run.why}." for run in found.below()]
    seeds = list(scene.traces)
    return Table(
        name=name,
        title=f"{found.trace}: how many times the accumulated WAF of each policy {found.reference} has",
        columns=("policy", "published", "simulated", "95% from", "to", "ETTR", "fitted inputs of the policy"),
        rows=tuple(rows),
        notes=(
            f"{found.cluster.num_gpus} GPUs, jobs {scene.workload.name}, seeds {seeds[0]} to {seeds[-1]}.",
            *([f"Fitted, so that agreement is no evidence: {', '.join(scene.fitted)}."] if scene.fitted else []),
            *(below or [f"{found.reference} is above every other policy in each run."]),
        ),
    )


def restart_path() -> Table:
    """The 68 minutes of a restart by hand, as the simulator plays them."""
    fault = Fault(at_s=DAY_S / 2, kind=ErrorKind.NCCL_TIMEOUT, node=0)
    spent = _standing(BASELINES["megatron-shrink"], fault, kind="7b", num_gpus=cases.NODE_GPUS)
    published = (("all-reduce time-out", 30), ("new submission", 9), ("environment, CUDA", 14), ("computed again", 15))
    simulated = [segment.duration_s / 60 for segment in spent]
    rows: list[tuple[Cell, ...]] = [(*it, minutes) for it, minutes in zip(published, simulated, strict=True)]
    rows.append(("in all", sum(minutes for _, minutes in published), sum(simulated)))
    notes = ("A job of GPT 7B on one node, an NCCL time-out, Megatron; the parts are inputs, that they add up is the result.",)
    return Table(
        name="restart-path",
        title="The 68 minutes of a restart by hand",
        columns=("part", "published, min", "simulated, min"),
        rows=tuple(rows),
        notes=notes,
    )


def transition_times() -> Table:
    """From the loss of a node until the job trains again, by the size of the cluster."""
    here = Unicron(name="unicron, production's bandwidths", transition=Transition(bandwidths=DEFAULT))
    policies = [Unicron(), here, *(BASELINES[name] for name in ("oobleck", "bamboo", "varuna", "gemini", "megatron-shrink"))]
    fault = Fault(at_s=DAY_S / 2, kind=ErrorKind.ECC_ERROR, node=0, repair_s=DAY_S)
    rows = [
        (kind, gpus, *(sum(s.duration_s for s in _standing(policy, fault, kind=kind, num_gpus=gpus)) for policy in policies))
        for kind, sizes in SIZES.items()
        for gpus in sizes
    ]
    return Table(
        name="transition-times",
        title="Seconds from the loss of a node until the only job of a cluster trains again",
        columns=("model", "GPUs", *(policy.name for policy in policies)),
        rows=tuple(rows),
        notes=(
            "An ECC error; detection is included, D_timeout of 30 min where there is no in-band detection.",
            "Megatron goes on with the nodes that are left (megatron-shrink); in the ratios it waits for the repair.",
            f"State moves at {LINKS.replica / 1e9:g} GB/s, assumed of the paper's cluster; beside it, this version's speed.",
            "The modelled times depend on the size only by where the state comes from, and how much of it there is.",
        ),
    )


def _standing(policy: Policy, fault: Fault, *, kind: str, num_gpus: int) -> list[Segment]:
    """What a job on the whole cluster does from the fault until it trains again, part by part."""
    cluster = SimCluster(num_nodes=num_gpus // cases.NODE_GPUS)
    job = cases.KINDS[kind].job(f"gpt-{kind}", max_gpus=num_gpus)
    trace = Trace(name="one fault", source="made", duration_s=DAY_S, faults=(fault,))
    found = [segment for segment in simulate(policy, trace, cluster, [job]).segments if segment.job == job.job]
    after = [segment for segment in found if segment.from_s >= fault.at_s]
    again = next(segment.from_s for segment in after if segment.use is Use.TRAINING)
    return [segment for segment in after if segment.from_s < again]


def multi_job(num_seeds: int, done: Done) -> Table:
    """Six jobs that compete for 128 GPUs: Unicron's allocation against simple rules."""
    rows = []
    below = []
    for case in cases.CASES:
        scene = build(Asked(trace="trace-a", jobs=f"case-{case}", policies=RULES, num_seeds=num_seeds))
        whole = replace(scene, traces={0: Trace(name="no faults", source="none", duration_s=DAY_S, faults=())})
        for when, it in (("without failures", whole), ("trace-a", scene)):
            found = compared(it, done)
            times = [found.times(rule) for rule in RULES]
            rows.append((case, when, *(_cells(time)[0] for time in times)))
            below += [f"Case {case}, {when}, seed {run.seed}: below {run.policy}; {run.why}." for run in found.below()]
    notes = (
        "The paper's cases are not known; these are ours (`simulation.cases`): 1 all alike, 2 small, 3 weights, 4 and 5 mixed.",
    )
    return Table(
        name="multi-job",
        title="Five cases of six jobs: Unicron's WAF over that of simple allocations",
        columns=("case", "when", *RULES),
        rows=tuple(rows),
        notes=(*notes, *(below or ["Unicron is above every rule, or equal to it, in each run."])),
    )


def multi_job_runs(num_seeds: int) -> int:
    """How often `multi_job` says that something is done."""
    return len(cases.CASES) * (num_seeds + 1) * (len(RULES) + 1)


def worths(num_seeds: int, done: Done) -> Table:
    """What each idea of Unicron's is worth."""
    columns = {}
    for name in ("trace-a", "trace-b"):
        scene = build(Asked(trace=name, policies=("ablations",), num_seeds=num_seeds))
        columns[name] = compared(scene, done)
    rows = tuple(
        (name, *(cell for found in columns.values() for cell in _cells(found.times(name)))) for name in scenes.ABLATIONS
    )
    between = tuple(text for name in columns for text in (name, "95% from", "to"))
    notes = (f"{num_seeds} seeds. Above 1: the idea earns that much; below 1: it costs.",)
    return Table(
        name="ablations",
        title="Unicron's WAF over that of Unicron without one of its ideas",
        columns=("without", *between),
        rows=rows,
        notes=notes,
    )


def sizes(done: Done) -> Table:
    """Beyond the papers: clusters of up to 100,000 GPUs."""
    rows = []
    for gpus in FLEET_GPUS:
        asked = Asked(trace=scenes.GENERATED, policies=("unicron-fleet", *PAPER, "gemini", "checkpoint-only"), days=FLEET_DAYS)
        scene = build(replace(asked, num_nodes=gpus // 8))
        found = compared(scene, done)
        times = [found.times(name) for name in found.results if name != found.reference]
        faults = sum(len(trace.faults) for trace in scene.traces.values())
        own = found.results[found.reference].books[0].cluster
        rows.append((gpus, len(scene.workload.jobs), faults, own.ettr, *(_cells(time)[0] for time in times)))
    return Table(
        name="sizes",
        title=f"Beyond the papers: {FLEET_DAYS:g} days on up to 100,000 GPUs, WAF of Unicron over that of others",
        columns=("GPUs", "jobs", "faults", "ETTR of Unicron", *PAPER, "gemini", "checkpoint-only"),
        rows=tuple(rows),
        notes=(
            "6.5 faults in 1,000 node-days (RSC-1), kinds of Figure 1, repairs fitted to StepFun's; one seed.",
            "Unicron is simulated as a fleet: the same decisions and allocation, in whole nodes, ranks without places.",
            "The jobs' speed is assumed: 140 TFLOP/s a GPU, to the power of 0.98. Others keep what was fitted for 128 GPUs.",
        ),
    )


def _cells(mean: Mean | None) -> tuple[Cell, Cell, Cell]:
    return (None, None, None) if mean is None else (mean.mean, mean.low, mean.high)
