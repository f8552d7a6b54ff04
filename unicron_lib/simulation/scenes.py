"""What is asked of a simulation, by name, as cluster, jobs, traces and policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from unicron_lib.errors import UserError
from unicron_lib.simulation import ablations, workloads
from unicron_lib.simulation.baselines import BASELINES, PAPER
from unicron_lib.simulation.cases import CLUSTER
from unicron_lib.simulation.closed_forms import DAY_S, RSC1_FAILURES
from unicron_lib.simulation.comparison import Comparison, compare
from unicron_lib.simulation.faults import Trace
from unicron_lib.simulation.fleet import Fleet
from unicron_lib.simulation.generators import Hazard, generated, trace_a, trace_b
from unicron_lib.simulation.policy import Policy
from unicron_lib.simulation.trace_readers import first_nodes, read_any
from unicron_lib.simulation.unicron import Unicron
from unicron_lib.simulation.workload import SimCluster
from unicron_lib.simulation.workloads import Workload

RANKED_NODES = 128
"""Up to so many nodes every rank has its place; beyond, Unicron is simulated as a fleet, unless asked for by name."""

MOST_NODES = 100_000

OF_PAPER = MappingProxyType({"trace-a": trace_a, "trace-b": trace_b})
GENERATED = "generated"

PUBLISHED: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "trace-a": MappingProxyType({"megatron": 1.2, "bamboo": 4.6, "oobleck": 3.7, "varuna": 4.8}),
        "trace-b": MappingProxyType({"megatron": 1.9, "bamboo": 4.8, "oobleck": 3.8, "varuna": 5.8}),
    }
)
"""So many times what each of them has accumulated is Unicron's WAF, by the Unicron paper, on its 128 GPUs."""

ABLATIONS: Mapping[str, Callable[[], Policy]] = MappingProxyType({make().name: make for make in ablations.ABLATIONS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to simulate.

    `trace` is trace-a, trace-b, generated (`days` long, `rate` faults in 1,000 node-days) or a file; `jobs` as
    `workloads.named` has them; `policies` are names, or the groups paper, ablations and all.
    What is None follows from the rest.
    """

    trace: str
    jobs: str | None = None
    policies: tuple[str, ...] = ("all",)
    num_nodes: int | None = None
    gpus_per_node: int = CLUSTER.gpus_per_node
    first_seed: int = 0
    num_seeds: int = 1
    days: float = 30.0
    rate: float = RSC1_FAILURES
    mtbf_gpu_s: float | None = None
    gpu_dollars_h: float = CLUSTER.gpu_dollars_h

    @property
    def seeds(self) -> range:
        """Of each run."""
        return range(self.first_seed, self.first_seed + self.num_seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that `comparison.compare` takes; `fitted` are inputs of the trace and the jobs that were fitted.

    `published` are the ratios that the paper has for the very scene.
    """

    cluster: SimCluster
    workload: Workload
    traces: Mapping[int, Trace]
    policies: tuple[Policy, ...]
    reference: str
    fitted: tuple[str, ...] = ()
    published: Mapping[str, float] = field(default_factory=dict)


def build(asked: Asked) -> Scene:
    """Look everything up. Raises UserError for a name that there is not, a bad file, or a cluster that does not fit it."""
    traces = _traces(asked)
    some = next(iter(traces.values()))
    num_nodes = asked.num_nodes or _nodes_of(asked, some)
    if asked.trace not in OF_PAPER:
        traces = {seed: first_nodes(trace, num_nodes) for seed, trace in traces.items()}
    cluster = SimCluster(
        num_nodes=num_nodes,
        gpus_per_node=asked.gpus_per_node,
        mtbf_gpu_s=asked.mtbf_gpu_s or _believed_s(asked, traces, num_nodes),
        gpu_dollars_h=asked.gpu_dollars_h,
    )
    name = asked.jobs or workloads.usual(num_nodes)
    workload = workloads.named(name, num_nodes=num_nodes, gpus_per_node=asked.gpus_per_node)
    policies, reference = _policies(asked.policies, num_nodes)
    is_papers = asked.trace in OF_PAPER and workload.name == "mixed" and cluster.num_gpus == CLUSTER.num_gpus
    return Scene(
        cluster=cluster,
        workload=workload,
        traces=traces,
        policies=policies,
        reference=reference,
        fitted=workload.fitted if asked.trace in OF_PAPER else (),
        published=PUBLISHED[asked.trace] if is_papers else {},
    )


def compared(scene: Scene, done: Callable[[], None]) -> Comparison:
    """All policies of the scene on all its traces; `done` is told after each run."""
    return compare(
        scene.policies,
        scene.traces,
        scene.cluster,
        scene.workload.jobs,
        reference=scene.reference,
        published=scene.published,
        done=done,
    )


def _traces(asked: Asked) -> dict[int, Trace]:
    num_nodes = asked.num_nodes or CLUSTER.num_nodes
    if asked.trace in OF_PAPER:
        return {seed: OF_PAPER[asked.trace](seed, num_nodes=num_nodes) for seed in asked.seeds}
    if asked.trace == GENERATED:
        hazard = Hazard(per_node_day=asked.rate / 1000)
        make = partial(generated, hazard, num_nodes=num_nodes, duration_s=asked.days * DAY_S)
        return {seed: make(seed) for seed in asked.seeds}
    path = Path(asked.trace)
    if not path.exists():
        raise UserError(f"there is no trace {path}: give {', '.join(OF_PAPER)}, {GENERATED}, or a file that exists")
    if asked.num_seeds > 1:
        raise UserError(f"the trace {path} is a file, it is the same for each of {asked.num_seeds} seeds: leave --seeds out")
    return {asked.first_seed: read_any(path)}


def _nodes_of(asked: Asked, trace: Trace) -> int:
    """Those of the paper, or as many as a file names."""
    if asked.trace in OF_PAPER or asked.trace == GENERATED:
        return CLUSTER.num_nodes
    found = max((fault.node for fault in trace.faults), default=CLUSTER.num_nodes - 1) + 1
    if found > MOST_NODES:
        raise UserError(f"the trace {asked.trace} names node {found - 1}, more than {MOST_NODES} nodes: give --nodes")
    return found


def _believed_s(asked: Asked, traces: Mapping[int, Trace], num_nodes: int) -> float:
    """What the planner believes of a GPU's time between losses: the usual on the paper's traces, else the trace's own mean."""
    if asked.trace in OF_PAPER:
        return CLUSTER.mtbf_gpu_s
    lost = sum(fault.takes_node for trace in traces.values() for fault in trace.faults)
    gpu_s = num_nodes * asked.gpus_per_node * sum(trace.duration_s for trace in traces.values())
    return gpu_s / max(1, lost)


def _policies(names: Sequence[str], num_nodes: int) -> tuple[tuple[Policy, ...], str]:
    """The reference first, then what was asked for, each once."""
    known: dict[str, Callable[[], Policy]] = {"unicron": Unicron, "unicron-fleet": Fleet}
    known |= {name: lambda policy=policy: policy for name, policy in BASELINES.items()}  # type: ignore[misc]
    known |= ABLATIONS
    groups = {"all": tuple(BASELINES), "paper": PAPER, "ablations": tuple(ABLATIONS)}
    wanted = [one for name in names for one in groups.get(name, (name,))]
    unknown = next((name for name in wanted if name not in known), None)
    if unknown:
        raise UserError(f"there is no policy {unknown}: give {', '.join([*groups, *known])}")
    usual = "unicron" if num_nodes <= RANKED_NODES else "unicron-fleet"
    reference = next((name for name in ("unicron", "unicron-fleet") if name in wanted), usual)
    return tuple(known[name]() for name in dict.fromkeys([reference, *wanted])), reference
