"""A rank that computes wrongly is found between two iterations, and one that does not is left in peace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from elastic_world import small_job
from layout_world import replicas_of, together
from memory_peers import Fault, Room
from stage import Stage

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.rank_messages import from_rank
from unicron_lib.detection.classify import classify
from unicron_lib.detection.sections import Section
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import Layout
from unicron_lib.training import recheck
from unicron_lib.training.digests import digest_of
from unicron_lib.training.handover import Memory
from unicron_lib.training.last_words import last_words
from unicron_lib.training.loop import Work
from unicron_lib.training.peers import CollectiveFailed
from unicron_lib.training.recheck import RERUNS, PeerComputesWrongly, Recheck, ResultsDiffer, WrongResult
from unicron_lib.training.siblings import Siblings

CPU = torch.device("cpu")
Compute = Callable[[int], float]
"""What a rank adds to its gradient when it computes for the n-th time, from 0: 0.0 is right."""


def right(_: int) -> float:
    return 0.0


class FakeReplica:
    def __init__(self, siblings: Siblings) -> None:
        self.device, self.siblings = CPU, siblings
        self.state = torch.arange(12, dtype=torch.float32)
        self.buffer = torch.zeros(8, dtype=torch.float32)

    def begin(self) -> None:
        self.buffer.zero_()

    @contextmanager
    def filling(self) -> Iterator[tuple[torch.Tensor, ...]]:
        yield (self.state,)


class Ranks:
    """The ranks of one job, each with what it computes; `tp` of them are a replica."""

    def __init__(self, *computes: Compute, iteration: int = 9, tp: int = 1, **keys: int) -> None:
        self.spec = small_job(**{"train_iters": 100, "rerun_check_interval": 5} | keys)
        layout = Layout(tp=tp, dp=len(computes) // tp)
        self.memories = [Memory(replica=FakeReplica(Siblings(layout, layout.place(r)))) for r in range(len(computes))]
        self.computes = list(computes)
        self.computed: list[list[tuple[int, int]]] = [[] for _ in computes]
        self.marks: list[Section] = []
        for memory in self.memories:
            memory.position.iteration, memory.position.is_whole = iteration, True

    def run(self, faults: tuple[Fault, ...] = (), times: int = 1) -> list[object]:
        """What becomes of each of them in one generation, whose check is called so many times."""
        room = Room(Stage(), len(self.computes), faults)

        def live(rank: int) -> object:
            own = Recheck(
                self.spec,
                memory=self.memories[rank],
                peers=room.peers(rank),
                add_gradients=lambda replica, iteration, micro_batch: self._add(rank, replica, iteration, micro_batch),
                mark=self.marks.append,
            )
            try:
                return [own.run() for _ in range(times)][-1]
            finally:
                room.leave(rank)

        outcomes = room.stage.run({rank: lambda rank=rank: live(rank) for rank in range(room.size)})
        return [outcomes[rank] for rank in range(room.size)]

    def _add(self, rank: int, replica: FakeReplica, iteration: int, micro_batch: int) -> None:
        replica.buffer += torch.arange(8) / 3 + self.computes[rank](len(self.computed[rank]))
        self.computed[rank].append((iteration, micro_batch))


def test_all_compute_the_same_micro_batch_once() -> None:
    ranks = Ranks(right, right, right)
    assert ranks.run() == [True] * 3
    assert ranks.computed == [[(9, 0)]] * 3
    assert ranks.marks.count(Section.COLLECTIVE) == 3
    assert ranks.marks[-1] is Section.STEP


def test_it_is_due_every_few_iterations_and_at_the_end() -> None:
    due = [it for it in range(-1, 13) if Ranks(right, right, iteration=it, train_iters=13).run() == [True] * 2]
    assert due == [4, 9, 12]


def test_it_is_never_due_when_it_is_off_or_for_a_rank_alone_or_amid_an_iteration() -> None:
    assert Ranks(right, right, rerun_check_interval=0).run() == [False] * 2
    assert Ranks(right).run() == [False]
    ranks = Ranks(right, right)
    for memory in ranks.memories:
        memory.effort.begin(10, (0, 1))
    assert ranks.run() == [False] * 2


@pytest.mark.parametrize("wrong", [lambda _: 1.0, lambda n: float(n == 0), lambda n: 1.0 + n])
def test_who_computes_wrongly_ends_itself_and_the_others_know(wrong: Compute) -> None:
    ranks = Ranks(right, right, wrong, right)
    outcomes = ranks.run()
    assert [type(outcome) for outcome in outcomes] == [*[PeerComputesWrongly] * 2, WrongResult, PeerComputesWrongly]
    assert {outcome.spoiled for outcome in outcomes} == {(5, 9)}
    assert [outcome.verdict for outcome in outcomes] == ["", "", "exclude", ""]
    assert "rank 2 computes wrongly" in str(outcomes[0])
    assert "iterations 5 to 9 cannot be trusted" in str(outcomes[2])
    assert ranks.computed == [[(9, 0)] * (1 + RERUNS)] * 4
    assert not any(memory.position.is_whole for memory in ranks.memories), "what they have is worth nothing"


def test_what_cannot_be_trusted_at_the_end_is_what_came_since_the_last_check() -> None:
    outcomes = Ranks(right, lambda _: 1.0, right, iteration=96, train_iters=97).run()
    assert {outcome.spoiled for outcome in outcomes} == {(95, 96)}


def test_of_two_nobody_is_accused() -> None:
    outcomes = Ranks(right, lambda _: 1.0).run()
    assert [type(outcome) for outcome in outcomes] == [ResultsDiffer] * 2
    assert {(outcome.spoiled, outcome.verdict) for outcome in outcomes} == {((5, 9), "")}


def test_replicas_that_have_drifted_apart_are_found_too() -> None:
    ranks = Ranks(right, right, right)
    ranks.memories[1].replica.state[3] += 1e-6
    assert [type(outcome) for outcome in ranks.run()] == [PeerComputesWrongly, WrongResult, PeerComputesWrongly]


def test_kernels_that_are_not_deterministic_turn_it_off_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(*[lambda n, rank=rank: float(1 + rank + 10 * n) for rank in range(3)])
    assert ranks.run(times=3) == [False] * 3, "it has been off since the first one"
    assert [len(done) for done in ranks.computed] == [1 + RERUNS] * 3
    assert caplog.text.count("not deterministic") == 3
    ranks.memories[1] = Memory(replica=FakeReplica(Siblings()))
    ranks.memories[1].position.iteration, ranks.memories[1].position.is_whole = 9, True
    assert ranks.run() == [True] * 3, "who is new has to hear of it first"
    assert [len(done) for done in ranks.computed] == [1 + RERUNS, 2 + RERUNS, 1 + RERUNS]
    assert all(memory.is_recheck_off and memory.position.is_whole for memory in ranks.memories)
    assert caplog.text.count("not deterministic") == 3


@pytest.mark.parametrize(
    ("error", "kind", "verdict"),
    [
        (WrongResult("rank 1 is wrong", (5, 9)), ErrorKind.CUDA_ERROR, "exclude"),
        (PeerComputesWrongly("rank 1 is wrong", (5, 9)), ErrorKind.NCCL_REMOTE_ERROR, ""),
        (ResultsDiffer("they differ", (5, 9)), ErrorKind.CUDA_ERROR, ""),
    ],
)
def test_a_failure_tells_what_cannot_be_trusted_and_goes_back_to_before_it(error, kind, verdict) -> None:
    env = SimpleNamespace(job="a", generation=1, rank=1)
    told = from_rank.validate_json(from_rank.dump_json(last_words(error, env, iteration=9)))
    failure = classify(Observation(node="n", boot="b", seq=0, at=1.0, body=told))
    assert (failure.kind, failure.verdict, failure.spoiled, failure.iteration) == (kind, verdict, (5, 9), 4)
    other = classify(Observation(node="n", boot="b", seq=0, at=1.0, body=last_words(KeyError("x"), env, iteration=9)))
    assert (other.verdict, other.spoiled, other.iteration) == ("", None, 9)


def test_a_peer_that_is_lost_meanwhile_accuses_nobody() -> None:
    outcomes = Ranks(right, right, right).run(faults=(Fault(rank=1, at=0),))
    assert [type(outcomes[rank]) for rank in (0, 2)] == [CollectiveFailed] * 2


def test_ranks_on_other_hardware_are_not_outvoted(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(["a", "a", "b", "a"] * 2)
    monkeypatch.setattr(recheck, "kind_of", lambda _: next(kinds))
    ranks = Ranks(right, right, right, right)
    assert ranks.run() == [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 777, 1000])
@pytest.mark.parametrize("bit", [0, 31])
def test_a_single_bit_changes_a_digest(dtype: torch.dtype, place: int, bit: int) -> None:
    for size in (1001, 1002):
        flat = torch.linspace(-1, 1, size, dtype=dtype)
        other = flat.clone()
        other.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert digest_of([flat]) == digest_of([flat.clone()])
        assert digest_of([flat]) != digest_of([other])
        assert digest_of([flat, other]) != digest_of([other, flat])


def test_kernels_are_what_they_were_when_the_check_is_over() -> None:
    with recheck.reproducible():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_kind_of_a_processor_is_the_same_each_time() -> None:
    assert recheck.kind_of(CPU) == recheck.kind_of(CPU) != ""


# --- replicas of several ranks


def slice_of(part: int) -> Compute:
    """What is right for the rank with that part."""
    return lambda _: 10.0 * part


def test_only_ranks_with_the_same_part_are_compared() -> None:
    ranks = Ranks(*[slice_of(0), slice_of(1)] * 2, tp=2)
    assert ranks.run() == [True] * 4
    assert ranks.computed == [[(9, 0)]] * 4


def test_one_replica_has_nobody_to_be_compared_with() -> None:
    assert Ranks(slice_of(0), slice_of(1), tp=2).run() == [False] * 2


def test_a_guilty_rank_is_outvoted_by_those_with_its_part_and_all_compute_again() -> None:
    ranks = Ranks(*[slice_of(0), slice_of(1)] * 2, slice_of(0), lambda _: 11.0, tp=2)
    outcomes = ranks.run()
    assert [type(outcome) for outcome in outcomes] == [*[PeerComputesWrongly] * 5, WrongResult]
    assert "rank 5 computes wrongly" in str(outcomes[0])
    assert ranks.computed == [[(9, 0)] * (1 + RERUNS)] * 6


def test_of_two_replicas_nobody_knows_which_one_is_wrong() -> None:
    ranks = Ranks(slice_of(0), slice_of(1), slice_of(0), lambda _: 11.0, tp=2)
    assert [type(outcome) for outcome in ranks.run()] == [ResultsDiffer] * 4


def test_who_was_misled_by_a_wrong_state_of_a_sibling_is_not_blamed() -> None:
    ranks = Ranks(*[slice_of(0), slice_of(1)] * 2, slice_of(0), lambda _: 11.0, tp=2)
    ranks.memories[4].replica.state[0] += 1
    assert [type(outcome) for outcome in ranks.run()] == [*[PeerComputesWrongly] * 4, WrongResult, PeerComputesWrongly]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_real_replicas_agree_unless_one_of_their_ranks_is_corrupt(tp: int, pp: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=3)
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "min_gpus": 2}
    spec = small_job(num_layers=2, rerun_check_interval=1, **sizes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memories = [Memory(replica=replica) for replica in replicas_of(spec, layout)]

    def check(rank: int, groups: dict) -> bool:
        memory, work = memories[rank], Work(spec, replica=layout.place(rank).dp, num_replicas=layout.dp)
        memory.position.iteration, memory.position.is_whole = 0, True
        mark = [].append
        own = Recheck(spec, memory=memory, peers=groups["peers"], add_gradients=work.add_gradients, mark=mark)
        with memory.replica.siblings.met(line=groups["line"], replica=groups["replica"]):
            return own.run()

    try:
        assert set(together(layout, check).values()) == {True}
        memories[3].replica.corrupt()
        outcomes = together(layout, check)
    finally:
        dist.destroy_process_group()
    assert {rank for rank, outcome in outcomes.items() if isinstance(outcome, WrongResult)} == {3}
    assert sum(isinstance(outcome, PeerComputesWrongly) for outcome in outcomes.values()) == 5
