"""What a rank does when a peer, the store or the agent fails: it keeps a whole iteration, says so, and obeys."""

import signal
import threading
import time

import pytest
import torch
from training_jobs import reference_losses, tiny

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.rank_messages import Progress, RankDrained, RankFailed, RankFinished, RankHello
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.training.ledger import check_ledger, ledger_directory, read_lineage
from unicron_lib.training.shards import read_state

NOTICED_S = 1.0


def wait_for_progress(ranks, iteration: int, *, generation: int = 1, rank: int = 0) -> None:
    ranks.agent.wait(Progress, generation=generation, rank=rank, when=lambda p: p.iteration >= iteration)


def test_survivors_of_a_killed_peer_park_and_one_of_them_saves_all(ranks, tmp_path) -> None:
    spec = tiny(job="killed", train_iters=12, pace_s=0.05, save_interval=100)
    ranks.launch(spec, 4)
    wait_for_progress(ranks, 3)
    killed_at = time.monotonic()
    ranks.signal("killed", 1, 2, signal.SIGKILL)
    failures = {rank: ranks.agent.wait(RankFailed, generation=1, rank=rank) for rank in (0, 1, 3)}
    assert ranks.exit_code("killed", 1, 2) == -signal.SIGKILL
    for at, failure in failures.values():
        assert failure.parked
        assert at - killed_at < NOTICED_S
    newest = max(failures, key=lambda rank: failures[rank][1].iteration)
    ranks.agent.order(1, newest, "save_replica")
    _, drained = ranks.agent.wait(RankDrained, generation=1, rank=newest)
    assert drained.manifest is not None
    assert drained.iteration == failures[newest][1].iteration >= 3
    for rank in failures:
        ranks.agent.order(1, rank, "quit")
        assert ranks.exit_code("killed", 1, rank) == 0
    ranks.launch(spec, 2, generation=2, restore_from=drained.manifest)
    ranks.agent.wait(RankFinished, generation=2, rank=1)
    directory = ledger_directory(ranks.run_dir, "killed")
    assert check_ledger(directory, spec) == []
    undisturbed = reference_losses(spec, tmp_path)
    assert [e.loss for e in read_lineage(directory)[0].values()] == pytest.approx(undisturbed, rel=1e-12)


def test_a_stopped_peer_becomes_a_killed_one(ranks) -> None:
    """Also without an abort: a survivor that waits for a stopped peer gets free when the agent kills that peer."""
    ranks.launch(tiny(job="stopped", train_iters=1000, pace_s=0.02), 2)
    wait_for_progress(ranks, 1)
    ranks.stop("stopped", 1, 1)
    killed_at = time.monotonic()
    ranks.signal("stopped", 1, 1, signal.SIGKILL)
    at, failure = ranks.agent.wait(RankFailed, generation=1, rank=0)
    assert failure.parked
    assert at - killed_at < NOTICED_S


def test_a_blocked_rank_exits_on_sigterm(ranks) -> None:
    ranks.launch(tiny(job="blocked", train_iters=1000, pace_s=0.02), 2)
    wait_for_progress(ranks, 1)
    ranks.stop("blocked", 1, 1)
    asked_at = time.monotonic()
    ranks.signal("blocked", 1, 0, signal.SIGTERM)
    assert ranks.exit_code("blocked", 1, 0) == 143
    assert time.monotonic() - asked_at < NOTICED_S


@pytest.mark.parametrize(
    ("order", "text", "error_type"),
    [
        ("raise", "", "InjectedError"),
        ("raise", "ConnectionResetError: by a peer", "ConnectionResetError"),
        ("nan", "", "FloatingPointError"),
    ],
)
def test_injected_errors_end_the_rank_with_a_report(ranks, order: str, text: str, error_type: str) -> None:
    ranks.launch(tiny(job="injected", train_iters=1000, pace_s=0.02), 2)
    wait_for_progress(ranks, 1)
    ranks.agent.order(1, 1, order, text=text)
    _, failure = ranks.agent.wait(RankFailed, generation=1, rank=1)
    assert (failure.error_type, failure.parked) == (error_type, False)
    assert failure.message == "by a peer" or not text
    assert error_type in failure.traceback
    assert ranks.exit_code("injected", 1, 1) == 1
    _, peer = ranks.agent.wait(RankFailed, generation=1, rank=0)
    assert peer.parked == (order == "raise")
    assert peer.iteration == failure.iteration


def test_a_rank_follows_its_agent_into_death(ranks) -> None:
    ranks.launch(tiny(job="alone", train_iters=1000, pace_s=0.02), 2)
    wait_for_progress(ranks, 1)
    ranks.agent.hang_up(1, 0)
    assert ranks.exit_code("alone", 1, 0) == 1


def test_training_goes_on_while_the_store_is_down(ranks) -> None:
    """The store's directory is away for a while; the save that fails costs no iteration."""
    spec = tiny(job="storeless", train_iters=12, save_interval=2, pace_s=0.02)
    blocked = ranks.run_dir.parent / "store"
    blocked.rmdir()
    ranks.launch(spec, 2)
    wait_for_progress(ranks, 10)
    assert "is not saved" in ranks.logs(), "the store was not down"
    blocked.mkdir()
    _, finished = ranks.agent.wait(RankFinished, generation=1, rank=0)
    assert finished.iteration == 11
    manifest, _ = CheckpointRepository(open_store(ranks.store_url), "storeless").newest_complete()
    assert manifest.iteration == 11


def test_a_finished_job_whose_last_save_fails_still_has_its_replica(ranks) -> None:
    """The store is down at the end, then rank 0 dies, then the job is drained and goes on from rank 1's memory."""
    spec = tiny(job="unsaved", train_iters=3)
    blocked = ranks.run_dir.parent / "store"
    blocked.rmdir()
    ranks.launch(spec, 2)
    wait_for_progress(ranks, 2, rank=1)
    ranks.signal("unsaved", 1, 0, signal.SIGKILL)
    ranks.agent.order(1, 1, "drain")
    _, failure = ranks.agent.wait(RankFailed, generation=1, rank=1)
    assert (failure.parked, failure.iteration) == (True, 2)
    ranks.agent.order(1, 1, "save_replica")
    assert ranks.agent.wait(RankDrained, generation=1, rank=1)[1].manifest is None
    blocked.mkdir()
    ranks.agent.order(1, 1, "save_replica")
    _, drained = ranks.agent.wait(RankDrained, generation=1, rank=1, when=lambda d: d.manifest is not None)
    ranks.launch(spec, 1, generation=2, restore_from=drained.manifest)
    _, finished = ranks.agent.wait(RankFinished, generation=2, rank=0)
    last = ranks.agent.all(Progress, generation=1, rank=1)[-1]
    assert (finished.iteration, finished.loss) == (2, last.loss)
    assert check_ledger(ledger_directory(ranks.run_dir, "unsaved"), spec) == []


def test_a_rank_whose_peer_never_comes_answers_a_drain_with_what_it_was_given(ranks) -> None:
    spec = tiny(job="partial", train_iters=20, pace_s=0.05)
    ranks.launch(spec, 1)
    wait_for_progress(ranks, 2)
    ranks.agent.order(1, 0, "drain")
    _, drained = ranks.agent.wait(RankDrained, generation=1, rank=0)
    ranks.launch(spec, 2, generation=2, restore_from=drained.manifest, only={0})
    ranks.agent.wait(RankHello, generation=2, rank=0)
    ranks.agent.order(2, 0, "drain")
    _, again = ranks.agent.wait(RankDrained, generation=2, rank=0)
    assert (again.iteration, again.manifest) == (drained.iteration, drained.manifest)
    assert ranks.exit_code("partial", 2, 0) == 0


def test_a_damaged_checkpoint_is_refused_before_it_is_used(ranks) -> None:
    spec = tiny(job="damaged", train_iters=4, save_interval=2, pace_s=0.05)
    ranks.launch(spec, 1)
    ranks.agent.wait(RankFinished, generation=1, rank=0)
    store = open_store(ranks.store_url)
    manifest, _ = CheckpointRepository(store, "damaged").newest_complete()
    data = bytearray(store.get(manifest.shards[0].key))
    data[len(data) // 2] ^= 1
    store.put(manifest.shards[0].key, bytes(data))
    ranks.launch(tiny(job="damaged", train_iters=8), 1, generation=2, restore_from=manifest.key)
    _, failure = ranks.agent.wait(RankFailed, generation=2, rank=0)
    assert (failure.error_type, failure.parked, failure.iteration) == ("CheckpointError", False, -1)
    older, skipped = CheckpointRepository(store, "damaged").newest_complete()
    assert (older.iteration, len(skipped)) == (1, 1)
    assert "another SHA-256" in skipped[0]


def test_a_replaced_generation_writes_no_more(ranks) -> None:
    spec = tiny(job="fenced", train_iters=1000, save_interval=2, pace_s=0.02)
    ranks.launch(spec, 2)
    wait_for_progress(ranks, 3)
    repository = CheckpointRepository(open_store(ranks.store_url), "fenced")
    repository.fence(2)
    newest, _ = repository.newest_complete()
    _, failure = ranks.agent.wait(RankFailed, generation=1, rank=0)
    assert (failure.error_type, failure.parked) == ("StaleGeneration", False)
    assert repository.newest_complete()[0] == newest


def test_a_missing_corpus_is_one_clear_sentence(ranks) -> None:
    ranks.launch(tiny(job="textless", data_path="/nowhere/text"), 1)
    _, failure = ranks.agent.wait(RankFailed, generation=1, rank=0)
    assert failure.error_type == "UserError"
    assert failure.message == "job 'textless': data_path '/nowhere/text' cannot be read: No such file or directory"


def test_a_store_that_is_none_is_one_clear_sentence(ranks) -> None:
    ranks.store_url = "ftp://somewhere"
    ranks.launch(tiny(job="storeless"), 1)
    _, failure = ranks.agent.wait(RankFailed, generation=1, rank=0)
    assert (failure.error_type, failure.parked) == ("UserError", False)
    assert failure.message.startswith("'ftp://somewhere' is no object store")


def test_a_replica_saves_the_same_state_as_all_ranks_together(ranks) -> None:
    """Two ways to the same iteration give the same tensors, bit for bit."""
    spec = tiny(job="replica", train_iters=1000, save_interval=5, pace_s=0.3)
    ranks.launch(spec, 2)
    repository = CheckpointRepository(open_store(ranks.store_url), "replica")
    wait_for_progress(ranks, 4)
    together = repository.load_manifest(wait_for_checkpoint(repository))
    state = read_state(repository, together)
    open_store(ranks.store_url).delete(together.key)
    ranks.signal("replica", 1, 1, signal.SIGKILL)
    _, failure = ranks.agent.wait(RankFailed, generation=1, rank=0)
    assert failure.iteration == 4, "the fault came too late"
    ranks.agent.order(1, 0, "save_replica")
    _, drained = ranks.agent.wait(RankDrained, generation=1, rank=0)
    alone = repository.load_manifest(drained.manifest)
    assert (len(together.shards), len(alone.shards)) == (2, 1)
    copy = read_state(repository, alone)
    assert state.keys() == copy.keys()
    assert all(torch.equal(state[name], copy[name]) for name in state)


def wait_for_checkpoint(repository: CheckpointRepository) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        manifest, _ = repository.newest_complete()
        if manifest is not None:
            return manifest.key
        threading.Event().wait(0.01)
    raise AssertionError("no checkpoint came")
