"""What a reallocation looks at: the cluster without what is broken, its jobs, and what each could do with GPUs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.jobs import JobState, JobStatus
from unicron_lib.domain.plans import Assignment, Layout, Slot
from unicron_lib.planning import explain, placement, pooled, throughput, transition_cost
from unicron_lib.planning.fitting import Fitted
from unicron_lib.planning.layout_choice import Choice, Layouts, Priced, kept_first
from unicron_lib.planning.memory import is_kept
from unicron_lib.planning.placement import Rules
from unicron_lib.planning.pools import Market
from unicron_lib.planning.reachability import CheckpointFormat, reachable
from unicron_lib.planning.throughput import Profile
from unicron_lib.planning.transition_cost import DEFAULT, Bandwidths
from unicron_lib.planning.waf import Demand

Measured = Mapping[str, Mapping[int, float]]
"""FLOP/s by job and number of GPUs."""
ANY_LAYOUT: Mapping[str, CheckpointFormat] = MappingProxyType({})
"""What the trainer of this project writes can be loaded in any layout."""


def current_slots(job: JobState) -> tuple[Slot, ...]:
    """The GPUs that the newest plan gave to the job, whether or not its transition is done."""
    newest = newest_assignment(job)
    return newest.slots if newest else ()


def newest_assignment(job: JobState) -> Assignment | None:
    """Where the newest plan has put the job, whether or not its transition is done."""
    return next((a for a in (job.pending, job.assignment) if a and a.generation == job.generation), None)


def layout_now(job: JobState) -> Layout | None:
    """The layout in which the newest plan runs the job, if its owner still allows that."""
    newest = newest_assignment(job)
    return newest.layout if newest and newest.layout in job.spec.layouts(newest.num_gpus) else None


def is_moving(job: JobState) -> bool:
    """Whether the job cannot be left alone: an unfinished plan has touched it, or its ranks are of an earlier life."""
    is_replaced = job.assignment is not None and job.assignment.generation != job.generation
    return job.pending is not None or is_replaced or (job.status is JobStatus.QUEUED and bool(job.nodes))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a reallocation looks at; `held_gpus` are spares that it leaves alone.

    `measured` are FLOP/s by job and number of GPUs, `measured_by_shape` by job, shape of a replica and number of GPUs.
    """

    state: ClusterState
    respond: Respond
    measured: Measured
    measured_by_shape: Mapping[str, Measured]
    rules: Rules
    checkpoint_formats: Mapping[str, CheckpointFormat]
    bandwidths: Bandwidths = DEFAULT
    held_gpus: int = 0

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Those that can be used."""
        return tuple(node for node in self._ready if not any(node.id in job.nodes for job in self.kept.values()))

    @property
    def _ready(self) -> tuple[Node, ...]:
        return tuple(node for node in self.state.healthy_nodes if node.id not in self.respond.quarantine)

    @cached_property
    def kept(self) -> dict[str, JobState]:
        """Jobs that stay as they are with all their nodes, as one of those is silent and nothing is known against it.

        Jobs that share a node with one of them stay, too, unless they have to move anyway.
        """
        silent = {node.id for node in self.state.nodes.values() if node.status is NodeStatus.SUSPECT}
        silent -= set(self.respond.quarantine)
        there = silent.union(node.id for node in self._ready)
        still = {name: job for name, job in self._wanting.items() if self._is_still(job) and job.nodes <= there}
        kept: dict[str, JobState] = {}
        while more := {name: job for name, job in still.items() if name not in kept and job.nodes & silent}:
            kept |= more
            silent = silent.union(*(job.nodes for job in more.values()))
        return kept

    def _is_still(self, job: JobState) -> bool:
        return bool(job.nodes) and not is_moving(job) and job.spec.job not in self.respond.faulted

    @cached_property
    def num_gpus(self) -> int:
        """GPUs that can be used: N'."""
        return sum(node.num_gpus for node in self.nodes)

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes that were ever there."""
        return sum(node.num_gpus for node in self.state.nodes.values())

    @property
    def just_lost(self) -> tuple[Node, ...]:
        """Nodes that the incidents in question have taken away, or that are put under quarantine now."""
        named = {self.state.incidents[name].node for name in self.respond.incidents if name in self.state.incidents}
        lost = (node for node in self.state.nodes.values() if node.id in named and node.status is NodeStatus.LOST)
        return (*lost, *(self.state.nodes[node] for node in self.respond.quarantine if node in self.state.nodes))

    @property
    def is_recovery(self) -> bool:
        """Whether something is broken, so that jobs wait for the answer."""
        return any(self.state.incidents[name].is_failure for name in self.respond.incidents if name in self.state.incidents)

    @cached_property
    def jobs(self) -> dict[str, JobState]:
        """Those that want GPUs, and are not kept as they are."""
        return {name: job for name, job in self._wanting.items() if name not in self.kept}

    @property
    def _wanting(self) -> dict[str, JobState]:
        stopped = self.respond.stop
        return {name: job for name, job in sorted(self.state.jobs.items()) if job.wants_gpus and name not in stopped}

    @cached_property
    def touched(self) -> frozenset[str]:
        """Jobs that need a new generation even if their size stays."""
        usable = {node.id for node in self.nodes}
        hit = {name for name, job in self.jobs.items() if is_moving(job) or not job.nodes <= usable}
        return frozenset(hit.union(self.respond.faulted))

    def demands(self, granularity_gpus: int) -> tuple[Demand, ...]:
        """The jobs as the allocation sees them. Raises UserError for a throughput that is not finite or negative."""
        return tuple(self._demand(job, granularity_gpus) for job in self.jobs.values())

    def _demand(self, job: JobState, granularity_gpus: int) -> Demand:
        name, size = job.spec.job, len(current_slots(job))
        current_flops = self._flops_now(job)
        transition_s = self._transition_s(job, current_flops)
        return Demand(
            job=name,
            throughput_flops=self._table(job, granularity_gpus),
            weight=job.spec.weight,
            current_gpus=size,
            current_flops=current_flops,
            faulted=name in self.touched,
            must_run=job.spec.must_run,
            transition_s=transition_s,
            relayout_s=self._relayout_s(job, current_flops, transition_s),
        )

    @cached_property
    def _profiles(self) -> dict[str, Profile | Choice]:
        return throughput.profiles(
            [job.spec for job in self.jobs.values()],
            self.measured,
            measured_by_shape=self.measured_by_shape,
            gpu_models=[node.gpu_model for node in self.nodes],
        )

    def _flops_now(self, job: JobState) -> float:
        profile, layout = self._profiles[job.spec.job], layout_now(job)
        return profile.flops_in(layout) if isinstance(profile, Choice) and layout else profile.flops(len(current_slots(job)))

    def _table(self, job: JobState, granularity_gpus: int) -> dict[int, float]:
        profile = self._profiles[job.spec.job]
        if isinstance(profile, Choice):
            own = self.layouts.ranked[job.spec.job]
            return {size: ranked[0].flops for size, ranked in own.items() if ranked and size % granularity_gpus == 0}
        table = throughput.table(job.spec, profile, num_gpus=self._most(job), granularity_gpus=granularity_gpus)
        return {size: flops for size, flops in table.items() if self._hindrance(job, job.spec.layout(size)) is None}

    def _most(self, job: JobState) -> int:
        tables = (job.spec.throughput_flops, *(it.throughput_flops for it in job.spec.parallel_layouts))
        return max(self.num_gpus, job.spec.min_gpus, *(size for table in tables for size in table))

    @cached_property
    def layouts(self) -> Layouts:
        """What jobs with a choice of layouts may have: their state can be loaded into it, and the nodes have room for it."""
        choices = {name: it for name, it in self._profiles.items() if isinstance(it, Choice)}
        return Layouts(ranked={name: self._ranked(self.jobs[name], choice) for name, choice in choices.items()})

    def _ranked(self, job: JobState, choice: Choice) -> dict[int, tuple[Priced, ...]]:
        now = layout_now(job)
        return {
            size: tuple(it for it in kept_first(choice.ranked(size), now) if self._is_possible(job, it.layout))
            for size in job.spec.sizes(self._most(job))
        }

    def _is_possible(self, job: JobState, layout: Layout) -> bool:
        """Whether its state can be loaded, and the nodes, if they are enough, have room for its groups of `layout.tp` GPUs."""
        room = sum(node.num_gpus // layout.tp * layout.tp for node in self.nodes)
        is_placeable = layout.num_gpus <= room or (layout.num_gpus > self.num_gpus and (room > 0 or not self.nodes))
        return is_placeable and self._hindrance(job, layout) is None

    def layout_of(self, job: str, num_gpus: int, layouts: Layouts) -> Layout:
        """The layout of a job on so many GPUs: the best of `layouts`, or the one that it always has."""
        best = layouts.best(job, num_gpus)
        return best.layout if best else self.jobs[job].spec.layout(num_gpus)

    def _hindrance(self, job: JobState, layout: Layout) -> str | None:
        """Why the job's state cannot be loaded into `layout`; None if it can."""
        written = self.checkpoint_formats.get(job.spec.job, CheckpointFormat.FULLY_RESHARDABLE)
        if written is CheckpointFormat.FULLY_RESHARDABLE:
            return None
        newest = newest_assignment(job)
        live = newest.layout if newest else None
        return reachable(layout, written, live, saved=live)

    @property
    def hindrances(self) -> tuple[str, ...]:
        """What would be needed for layouts that are left out."""
        jobs = (self.jobs[name] for name in sorted(self.checkpoint_formats) if name in self.jobs)
        wanted = ((job, layout) for job in jobs for size in job.spec.sizes(self.num_gpus) for layout in job.spec.layouts(size))
        found = ((job.spec.job, self._hindrance(job, layout)) for job, layout in wanted)
        return tuple(dict.fromkeys(f"{name} keeps to layouts that can load its state: {why}" for name, why in found if why))

    def place(self, gpus: Mapping[str, int], layouts: Layouts) -> placement.Placement:
        """Where the jobs go. Raises CannotBePlaced."""
        current = {name: current_slots(job) for name, job in self.jobs.items()}
        return placement.arrange(gpus, current, self.nodes, replace(self.rules, group_gpus=self._groups(gpus, layouts)))

    def _groups(self, gpus: Mapping[str, int], layouts: Layouts) -> dict[str, int]:
        return {name: self.layout_of(name, number, layouts).tp for name, number in gpus.items()}

    def _has_replica(self, job: JobState) -> bool:
        """Whether ranks that live on have the whole state. Each GPU that is lost may have been of another replica."""
        newest = newest_assignment(job)
        slots = newest.slots if newest else ()
        lost = sum(slot.node not in self.state.nodes or self.state.nodes[slot.node].status is NodeStatus.LOST for slot in slots)
        return max(lost, job.spec.job in self.respond.faulted) < (newest.layout.dp if newest else 0)

    def _transition_s(self, job: JobState, flops: float) -> float:
        """What a move of the job costs if its layout stays."""
        move = transition_cost.move_of(job.spec, flops)
        has_replica = self._has_replica(job)
        # memory is asked only when no rank lives on
        is_in_memory = not has_replica and self._is_in_memory(job)
        origin = transition_cost.source(
            move, moves=True, has_replica=has_replica, is_in_memory=is_in_memory, bandwidths=self.bandwidths
        )
        return transition_cost.transition_s(move, origin, self.bandwidths)

    def _is_in_memory(self, job: JobState) -> bool:
        newest = newest_assignment(job)
        return newest is not None and is_kept(job, newest.homes, self._answering)

    def _relayout_s(self, job: JobState, flops: float, transition_s: float) -> dict[int, float]:
        """What is added on sizes where the layout changes, by whether ranks that live on have a whole state to save first."""
        now, ranked = layout_now(job), self.layouts.ranked.get(job.spec.job, {})
        if now is None:
            return {}
        is_saved = job.spec.job not in self.touched or self._has_replica(job)
        move = transition_cost.move_of(job.spec, flops)
        cost_s = transition_cost.relayout_s(
            move, is_saved=is_saved, is_in_memory=self._is_in_memory(job), bandwidths=self.bandwidths
        )
        changing = (size for size, own in ranked.items() if own and own[0].layout.shape != now.shape)
        return dict.fromkeys(changing, max(0.0, cost_s - transition_s))

    @cached_property
    def _answering(self) -> frozenset[str]:
        """Nodes whose memory can be asked for, whether or not ranks may run there."""
        silent = {NodeStatus.LOST, NodeStatus.SUSPECT}
        return frozenset(node.id for node in self.state.nodes.values() if node.status not in silent)

    @property
    def home(self) -> dict[str, str]:
        """The pool of each node, lost ones included."""
        return {node.id: node.pool for node in self.state.nodes.values()}

    def pooled_jobs(self, demands: Iterable[Demand]) -> list[pooled.PooledJob]:
        """The jobs with their tables in each pool."""
        return [self._pooled_job(demand) for demand in demands]

    def _pooled_job(self, demand: Demand) -> pooled.PooledJob:
        job = self.jobs[demand.job]
        current, home = current_slots(job), self.home
        here = next((home[slot.node] for slot in current if slot.node in home), None)
        tables = pooled.tables(job.spec, demand.throughput_flops, pools=sorted(set(home.values())), home=here)
        flops = tables.get(here or "", {}).get(len(current), demand.current_flops)
        known = replace(demand, current_flops=flops if current else 0.0)
        return pooled.PooledJob(demand=known, tables=tables, current=current, tenant=job.spec.tenant)

    def share_pools(self, market: Market, *, time_limit_s: float, timer: Callable[[], float]) -> Fitted:
        """A failure is answered within each pool, everything else with a look at all of them."""
        fitted = pooled.share(
            market,
            self.nodes,
            {name: current_slots(job) for name, job in self.jobs.items()},
            places=self.rules,
            groups=lambda gpus: self._groups(gpus, self.layouts),
            may_move=not self.is_recovery,
            time_limit_s=time_limit_s,
            timer=timer,
        )
        return replace(fitted, layouts=self.layouts)

    def explain(self, fitted: Fitted, demands: tuple[Demand, ...], notes: tuple[str, ...]) -> str:
        """Why the allocation is what it is."""
        return explain.allocation_reason(
            fitted.allocation,
            demands,
            cause=self.respond.reason,
            num_gpus=self.num_gpus - self.held_gpus,
            total_gpus=self.total_gpus,
            notes=(*fitted.notes, *self.hindrances, *notes),
        )
