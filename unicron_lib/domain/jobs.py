"""A training job as its owner describes it, and as the cluster sees it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from math import isfinite
from typing import ClassVar

from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Assignment, Layout
from unicron_lib.domain.replica_checks import replica_checks
from unicron_lib.domain.skipping import Ranges
from unicron_lib.domain.timeout_checks import timeout_checks

POSITIVE = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size"),
    *("global_batch_size", "train_iters", "save_retain", "log_interval", "min_gpus", "lr"),
    *("distributed_timeout_minutes", "loss_spike_patience_iters", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
FINITE = (
    *("weight", "transition_s", "lr", "min_lr", "weight_decay", "clip_grad", "hidden_dropout", "pace_s", "restart_window_s"),
    *("hang_factor", "hang_patience_s", "distributed_timeout_minutes"),
)
OF_A_COMMAND = ("working_dir", "env", "checkpoint_dir", "repair_tracker", "parks")
OF_THE_TRAINER = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "parallel_layouts"),
    *("train_iters", "seed", "lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad"),
    *("hidden_dropout", "params_dtype", "data_path"),
    *("save_interval", "save_retain", "memory_interval", "load", "log_interval", "pace_s", "rerun_check_interval"),
)
"""Keys that only a job with a command has, and those that it has not: they are our own trainer's."""
OF_THE_AGENT = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    }
)
"""Variables of a rank that are the agent's to set, as those are that begin with `UNICRON_` or `TORCHELASTIC_`."""
MAX_WEIGHT = 1e6
MAX_FLOPS = 1e24
"""Bounds that keep every sum of the objective finite."""
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job; keys carry Megatron's names where Megatron has one.

    `throughput_flops` maps a number of GPUs to the achieved FLOP/s of the whole job, T(t, x) of the paper; sizes that
    it lacks are not offered. `throughput_by_pool` has such a table for each pool that the job may use, `pool` is the only
    one if it is given. Left out, the job's own measurements fill it. `pace_s` is a floor for the duration of one
    iteration, with which a toy model stands in for a large one. `load` "latest" goes on from the newest checkpoint of an
    earlier submission of the same name; without it each submission begins anew. Every `save_interval` iterations it saves;
    0: as often as pays, by what that costs and how often machines fail. Every `memory_interval` iterations the state is copied
    into host memory; 0: never, None: as often as that takes no more than a hundredth of the time. Every
    `rerun_check_interval` iterations, and after the last one, all ranks compute the same micro-batch and compare; 0: never.

    It runs on whole replicas of `tensor_model_parallel_size * pipeline_model_parallel_size` GPUs, or in that one of its
    `parallel_layouts` which is the best on the GPUs that it gets; these may have the `throughput_flops` themselves.
    A job with a `command` is any program that torchrun could start; a first word `python` is the agent's own interpreter. It
    has no keys of our trainer. It runs in `working_dir` ("": a directory of the job's own on each node), with `env` on top of
    the agent's variables. `checkpoint_dir` is where it saves in Megatron-LM's layout, if it does: then its tracker file is
    checked before each start, and with `repair_tracker` put back to the newest complete iteration. One that `parks` lives on.
    Raises ValueError with one sentence for a value that is out of range or contradicts another one.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    job: str
    weight: float = 1.0
    min_gpus: int = 1
    max_gpus: int | None = None
    must_run: bool = False
    max_restarts: int = 3
    restart_window_s: float = 600.0
    hang_factor: float = 3.0
    hang_patience_s: float = 5.0
    section_timeouts_s: Mapping[str, float] = field(default_factory=dict)
    distributed_timeout_minutes: float = 10.0
    loss_guard: bool = True
    loss_spike_patience_iters: int = 50
    transition_s: float = 10.0
    pool: str = ""
    tenant: str = ""
    throughput_flops: Mapping[int, float] = field(default_factory=dict)
    throughput_by_pool: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    command: tuple[str, ...] = ()
    working_dir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dir: str = ""
    repair_tracker: bool = False
    parks: bool = False

    num_layers: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 64
    vocab_size: int = 256
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    parallel_layouts: tuple[ParallelLayout, ...] = ()
    micro_batch_size: int = 1
    global_batch_size: int = 8
    train_iters: int = 100
    seed: int = 1234
    lr: float = 1e-3
    min_lr: float = 1e-4
    lr_warmup_iters: int = 0
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    hidden_dropout: float = 0.0
    params_dtype: str = "float32"
    data_path: str = "builtin:sonnets"
    save_interval: int = 20
    save_retain: int = 3
    memory_interval: int | None = None
    rerun_check_interval: int = 0
    load: str = ""
    log_interval: int = 1
    pace_s: float = 0.0

    def __post_init__(self) -> None:
        for broken, sentence in self._checks():
            if broken:
                raise ValueError(f"job {self.job!r}: {sentence}")

    def _checks(self) -> tuple[tuple[bool, str], ...]:
        too_small = [key for key in POSITIVE if getattr(self, key) <= 0]
        endless = [key for key in FINITE if not isfinite(getattr(self, key))]
        most = self.max_gpus if self.max_gpus is not None else self.min_gpus
        batches = self.micro_batch_size and self.global_batch_size // self.micro_batch_size
        return (
            (not NAME.fullmatch(self.job), "a job's name has 1 to 63 lower-case letters, digits and inner dashes"),
            (bool(endless), f"{', '.join(endless)} must be a finite number"),
            (bool(too_small), f"{', '.join(too_small)} must be greater than 0"),
            (
                not 0 < self.weight <= MAX_WEIGHT,
                f"weight is {self.weight}, it must be greater than 0 and at most {MAX_WEIGHT:g}",
            ),
            (min(self.transition_s, self.pace_s, self.min_lr) < 0, "transition_s, pace_s and min_lr must not be negative"),
            (
                not 0 <= self.hidden_dropout < 1,
                f"hidden_dropout is {self.hidden_dropout:g}, it must be at least 0 and less than 1",
            ),
            (self.load not in {"", "latest"}, f'load is {self.load!r}, it must be "latest" or left out'),
            (min(self.memory_interval or 0, self.save_interval) < 0, "memory_interval and save_interval must not be negative"),
            (self.rerun_check_interval < 0, "rerun_check_interval must not be negative"),
            (min(self.max_restarts, self.restart_window_s) < 0, "max_restarts and restart_window_s must not be negative"),
            (self.min_gpus > most, f"min_gpus {self.min_gpus} is greater than max_gpus {self.max_gpus}"),
            (
                bool(self.micro_batch_size) and self.global_batch_size % self.micro_batch_size != 0,
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}",
            ),
            (
                self.min_gpus > batches * max(it.replica.num_gpus for it in self._cuts) and not self.command,
                f"min_gpus {self.min_gpus} leaves ranks without work: a global batch has {batches} micro-batches",
            ),
            (
                bool(self.num_attention_heads) and self.hidden_size % self.num_attention_heads != 0,
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}",
            ),
            (self.vocab_size < 256 and self.data_path.startswith("builtin:"), "byte tokens need a vocab_size of at least 256"),
            (self.params_dtype not in {"float32", "float64", "bfloat16"}, f"params_dtype {self.params_dtype!r} is unknown"),
            *replica_checks(self),
            *self._command_checks(),
            *self._throughput_checks(),
            *timeout_checks(self),
        )

    def _command_checks(self) -> tuple[tuple[bool, str], ...]:
        left = {field.name for field in fields(self) if getattr(self, field.name) == DEFAULTS[field.name]}
        ignored = [key for key in OF_THE_TRAINER if key not in left]
        alone = [key for key in OF_A_COMMAND if key not in left]
        ours = [name for name in self.env if name in OF_THE_AGENT or name.startswith(("UNICRON_", "TORCHELASTIC_"))]
        texts = (*self.command, self.working_dir, self.checkpoint_dir, *self.env.keys(), *self.env.values())
        return (
            (bool(self.command) and not self.command[0].strip(), "command has no program: write [python, train.py, ...]"),
            (
                bool(self.command and ignored),
                f"it has a command, which knows nothing of {', '.join(ignored)}: leave that out, or give it as arguments",
            ),
            (bool(alone) and not self.command, f"{', '.join(alone)} means nothing without a command"),
            (self.repair_tracker and not self.checkpoint_dir, "repair_tracker needs a checkpoint_dir"),
            (any("\0" in text for text in texts), "command, directories and env must not contain a NUL character"),
            (any(not name or "=" in name for name in self.env), "env maps names of variables, without =, to texts"),
            (bool(ours), f"env sets {', '.join(sorted(ours))}, which the agent sets for each rank: leave that out"),
        )

    def _throughput_checks(self) -> tuple[tuple[bool, str], ...]:
        by_pool = self.throughput_by_pool
        by_layout = [it.throughput_flops for it in self.parallel_layouts if it.throughput_flops]
        figures = [pair for table in (self.throughput_flops, *by_pool.values(), *by_layout) for pair in table.items()]
        return (
            (
                any(gpus < 1 or not 0 <= flops <= MAX_FLOPS for gpus, flops in figures),
                "throughput_flops and throughput_by_pool map numbers of GPUs (1 or more) to finite FLOP/s",
            ),
            (
                bool(self.throughput_flops or by_layout) and not self.sizes(max(gpus for gpus, _ in figures)),
                "throughput_flops has no size that min_gpus, max_gpus and the global batch allow",
            ),
            (
                bool(by_pool) and not any(self.admits(gpus) for table in by_pool.values() for gpus in table),
                "throughput_by_pool has no size that min_gpus, max_gpus and the global batch allow",
            ),
            (
                bool(self.pool and by_pool) and self.pool not in by_pool,
                f"pool is {self.pool}, but throughput_by_pool has only {', '.join(sorted(by_pool))}",
            ),
            (
                bool(by_pool and self.throughput_flops),
                "throughput_flops and throughput_by_pool are both given: keep one of them",
            ),
            (
                bool(by_layout and (by_pool or self.throughput_flops)),
                "parallel_layouts have throughput_flops of their own, and so has the job: keep one of them",
            ),
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one iteration, over all ranks."""
        return self.global_batch_size // max(1, self.micro_batch_size)

    def sizes(self, num_gpus: int) -> tuple[int, ...]:
        """The numbers of GPUs, up to `num_gpus`, on which the job can run."""
        tables = [self.throughput_flops, *(it.throughput_flops for it in self.parallel_layouts)]
        cuts, most = self._cuts, min(num_gpus, self.max_gpus or num_gpus)
        offered = {size for table in tables for size in table} or range(self.min_gpus, most + 1)
        return tuple(x for x in sorted(offered) if self.min_gpus <= x <= most and any(self._in(cuts, x)))

    def admits(self, num_gpus: int) -> bool:
        """Whether the job's own limits allow that many GPUs."""
        return self.min_gpus <= num_gpus <= (self.max_gpus or num_gpus) and any(self._in(self._cuts, num_gpus))

    def layouts(self, num_gpus: int) -> tuple[Layout, ...]:
        """The layouts in which it may run on `num_gpus` GPUs, in its owner's order."""
        return tuple(it for it in self._in(self._cuts, num_gpus) if it)

    def _in(self, cuts: tuple[ParallelLayout, ...], num_gpus: int) -> Iterator[Layout | None]:
        """Every replica has a micro-batch; how a command shares its batch is its own affair."""
        most = None if self.command else self.num_micro_batches
        return (it.on(num_gpus, max_replicas=most) for it in cuts)

    @property
    def _cuts(self) -> tuple[ParallelLayout, ...]:
        tp, pp = max(1, self.tensor_model_parallel_size), max(1, self.pipeline_model_parallel_size)
        fixed = ParallelLayout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        return self.parallel_layouts or (fixed,)

    @property
    def guards_loss(self) -> bool:
        """Whether an anomaly of the loss takes it back: of a command we know neither checkpoints nor batches."""
        return self.loss_guard and not self.command

    def layout(self, num_gpus: int) -> Layout:
        """The parallel layout on `num_gpus` GPUs if nothing else tells: at least one replica, of several layouts the most."""
        first = self._cuts[0].replica
        return max(self.layouts(num_gpus), key=lambda it: it.dp, default=replace(first, dp=max(1, num_gpus // first.num_gpus)))


DEFAULTS: Mapping[str, object] = {
    it.name: it.default_factory() if it.default_factory is not MISSING else it.default for it in fields(JobSpec)
}


class JobStatus(StrEnum):
    """A job's life: queued, running (also while it moves), then one of the ends."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = frozenset({JobStatus.FINISHED, JobStatus.CANCELLED, JobStatus.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job in the cluster.

    `generation` is the newest one that a plan has decided: the fencing token. `assignment` is where that (or, while a
    transition runs, the previous) generation lives; `pending` where the running transition moves it; `left_on` are the nodes of
    earlier generations whose ranks have not been stopped yet.
    `iteration` is the last one that the journal knows of, `failed_at` the one at which the job last failed, and
    `stuck_restarts` counts the failures since then that came without a new iteration. `failed_times` are those of the
    answers to failures of the job's own within its `restart_window_s`. `restored` tells whether this submission has been
    launched, `measured` holds its own FLOP/s by number of GPUs in the pool `measured_in`, `measured_by_shape` does so by the
    shape of a replica if the job may have several, `stragglers` what slows its present generation down: the rank (or "job"),
    and the evidence. `skipped` are the batches that are left out because of what they did to the loss, `rolled_back_to` is the
    last iteration that the next start may go on from (None: any), `went_back_in` the generation in which it went back last, and
    `loss_spike` tells of a spike of the loss that may still pass. `done_ranks` are the pairs (generation, rank) of a command's
    ranks that have ended well. `begins_with` is the first generation of this submission: what older ones do is not its own.
    """

    spec: JobSpec
    status: JobStatus = JobStatus.QUEUED
    generation: int = 0
    assignment: Assignment | None = None
    pending: Assignment | None = None
    left_on: tuple[str, ...] = ()
    iteration: int = -1
    failed_at: int | None = None
    stuck_restarts: int = 0
    failed_times: tuple[float, ...] = ()
    restored: bool = False
    measured: Mapping[int, float] = field(default_factory=dict)
    measured_by_shape: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    measured_in: str = ""
    stragglers: Mapping[str, str] = field(default_factory=dict)
    skipped: Ranges = ()
    rolled_back_to: int | None = None
    went_back_in: int = 0
    loss_spike: str = ""
    done_ranks: tuple[tuple[int, int], ...] = ()
    submission: str = ""
    begins_with: int = 0
    reason: str = ""

    @property
    def gpus(self) -> int:
        """GPUs that the job holds now."""
        return self.assignment.num_gpus if self.assignment else 0

    @property
    def is_done(self) -> bool:
        """Whether all ranks of the present generation of a command have ended well."""
        placed = next((it for it in (self.pending, self.assignment) if it and it.generation == self.generation), None)
        done = {rank for generation, rank in self.done_ranks if generation == self.generation}
        return placed is not None and len(done) >= placed.num_gpus

    @property
    def wants_gpus(self) -> bool:
        """Whether a plan may give it GPUs."""
        return self.status not in ENDED

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes on which ranks of the job may be running."""
        held = (assignment for assignment in (self.assignment, self.pending) if assignment)
        return frozenset(self.left_on).union(slot.node for assignment in held for slot in assignment.slots)
