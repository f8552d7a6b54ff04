"""The journal on a store: one winner a number, an id once, snapshots, and nothing illegal ever written."""

import threading
from typing import get_args

import pytest
from scenes import running_pair

from unicron_lib import journal as journal_module
from unicron_lib.adapters.files import FileStore
from unicron_lib.detection.measured import measurements
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event, NodeJoined, RecoveryCompleted
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.journal import FOLDS
from unicron_lib.errors import IllegalTransition
from unicron_lib.journal import Journal, event_json, state_json


def joined(number, node="node-1"):
    return NodeJoined(id=f"join-{number}", at=1.0, node=node, boot=f"boot-{number}", address="127.0.0.1", num_gpus=2)


def test_racing_writers_own_one_number_each(tmp_path):
    store = FileStore(tmp_path)
    journals = [Journal(store) for _ in range(6)]
    start = threading.Barrier(6)

    def write(number):
        start.wait()
        for round_ in range(10):
            assert journals[number].append(joined(f"{number}-{round_}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = Journal(store).entries()
    assert [entry.seq for entry in entries] == list(range(60))
    assert len({entry.event.id for entry in entries}) == 60
    assert len({entry.writer for entry in entries}) == 6


def test_racing_reports_of_one_thing_are_journalled_once(tmp_path):
    store = FileStore(tmp_path)
    start = threading.Barrier(8)
    won = []

    def write():
        journal = Journal(store)
        start.wait()
        won.append(journal.append(joined(1)))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert len(Journal(store).entries()) == 1


def test_a_story_reads_the_same_from_entries_and_from_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 7)
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    scene.settle()
    store = FileStore(tmp_path)
    writer = Journal(store)
    for event in scene.events:
        writer.append(event)
    assert store.list("snapshots/")
    reader = Journal(store)
    assert reader.refresh() == scene.state
    assert not reader.append(scene.events[0]), "an id from before the snapshot is still known"


def test_who_has_not_looked_since_others_wrote_still_writes_what_follows_them(tmp_path):
    store = FileStore(tmp_path)
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    scene.settle()
    first, stale = Journal(store), Journal(store)
    stale.append(scene.events[0])
    for event in scene.events[:-1]:
        first.append(event)
    assert stale.append(scene.events[-1]), "it follows only what the other has written"
    assert not stale.append(scene.events[1]), "the other has written it"
    assert Journal(store).refresh() == scene.state == stale.state


def test_an_append_costs_one_request_if_nobody_else_writes(tmp_path, monkeypatch):
    journal = Journal(FileStore(tmp_path))
    journal.append(joined(1))
    asked = []
    for name in ("get", "list", "put_if_absent"):
        call = getattr(FileStore, name)
        monkeypatch.setattr(FileStore, name, lambda *args, call=call, name=name: asked.append(name) or call(*args))
    assert journal.append(joined(2))
    assert asked == ["put_if_absent"]


def test_what_cannot_follow_is_never_written(tmp_path):
    journal = Journal(FileStore(tmp_path))
    with pytest.raises(IllegalTransition):
        journal.append(RecoveryCompleted(id="done", at=1.0, plan="plan-x"))
    assert journal.entries() == []
    assert journal.refresh() == ClusterState()


def test_events_and_state_survive_json():
    scene = running_pair()
    scene.lose("node-1")
    scene.settle()
    for event in scene.events:
        assert event_json.validate_json(event_json.dump_json(event)) == event
    assert state_json.validate_json(state_json.dump_json(scene.state)) == scene.state


def test_what_a_job_achieved_is_known_to_planning_whatever_is_restarted(tmp_path):
    scene = running_pair()
    job = scene.state.jobs["gpt-a"]
    news = list(measurements(job, {2: 4.0e8, 4: 9.0e8, 8: float("nan")}, now=scene.now, generation=1))
    assert [(event.num_gpus, event.flops) for event in news] == [(2, 4.0e8), (4, 9.0e8)]
    for event in news:
        scene.tell(event)
    known = scene.state.jobs["gpt-a"]
    assert known.measured == {2: 4.0e8, 4: 9.0e8}
    assert not list(measurements(known, {2: 4.1e8, 4: 9.0e8}, now=scene.now, generation=1)), "a few per cent are no news"
    assert [event.num_gpus for event in measurements(known, {2: 5.0e8}, now=scene.now, generation=1)] == [2]


def test_every_event_has_its_fold():
    assert set(FOLDS) == set(get_args(Event))
