"""What the controller answers: frozen, one JSON object each."""

from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import TypeAdapter

from unicron_lib.agent.messages import Observation, RankInfo
from unicron_lib.agent.rank_messages import NAN_STAYS_NAN
from unicron_lib.controller.origins import Origin
from unicron_lib.detection.loss_guard import Point
from unicron_lib.detection.windows import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the controller works; `journal_error` is empty while it can write the journal."""

    ok: bool
    num_nodes: int
    journal_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as the controller sees it now; `verdict` is alive, suspect or lost.

    One that comes and goes gets no ranks before `snoozed_until` (epoch seconds; 0: it may have them now). At `memory_port` it
    takes and gives states (0: it does not).
    """

    node: str
    boot: str
    address: str
    num_gpus: int
    connected: bool
    verdict: str
    reason: str
    silent_s: float
    ranks: tuple[RankInfo, ...] = ()
    snoozed_until: float = 0.0
    memory_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """The newest of a job's generation that reported last.

    `loss` is the one of `iteration`; `iterations` holds the last iteration of each rank; `first_iteration_at` is the
    wall clock of the generation's first report. `measured_flops` maps its number of ranks to the best FLOP/s of the whole
    job that it has reported. `window` compares its ranks over its newest 16 iterations, `nodes` tells where each rank is.
    `curve` is the loss of its newest iterations, as far as they were heard of, in order; `origins` tell how
    each rank came by its state.
    """

    __pydantic_config__: ClassVar = NAN_STAYS_NAN

    job: str
    generation: int
    world_size: int
    iteration: int
    loss: float
    iteration_s: float
    flops: float
    at: float
    first_iteration_at: float
    iterations: dict[int, int]
    measured_flops: dict[int, float]
    window: Window | None = None
    nodes: dict[int, str] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    origins: dict[int, Origin] = field(default_factory=dict)

    def has_stepped(self, generation: int, world_size: int | None = None) -> bool:
        """Whether every rank of `generation`, or of a later one, has done an iteration."""
        ranks = self.world_size if world_size is None or self.generation > generation else world_size
        return self.generation >= generation and len(self.iterations) >= ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """How many of the named observations were still waiting, or how many there were of all."""

    acknowledged: int


nodes_json: TypeAdapter[tuple[NodeView, ...]] = TypeAdapter(tuple[NodeView, ...])
progress_json: TypeAdapter[JobProgress] = TypeAdapter(JobProgress)
all_progress_json: TypeAdapter[tuple[JobProgress, ...]] = TypeAdapter(tuple[JobProgress, ...], config=NAN_STAYS_NAN)
observations_json: TypeAdapter[tuple[Observation, ...]] = TypeAdapter(tuple[Observation, ...], config=NAN_STAYS_NAN)
watchers_json: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, float])
health_json: TypeAdapter[Health] = TypeAdapter(Health)
acknowledged_json: TypeAdapter[Acknowledged] = TypeAdapter(Acknowledged)
