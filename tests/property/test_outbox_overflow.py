"""An outbox in the face of a flood: like one that has all the memory in the world, whatever is acknowledged when."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from unicron_lib.agent.messages import GpuFault, Observation, RankExited
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFailed, RankFinished
from unicron_lib.agent.spill import COMPACT_BYTES, MOST_UNWRITTEN, Spill

IN_MEMORY = 4
FINISHED = RankFinished(job="a", generation=1, rank=0, iteration=1, loss=float("nan"))


def failed(text: str) -> RankFailed:
    return RankFailed(
        job="a", generation=1, rank=0, iteration=1, error_type="E", message=text, traceback="a\nb\u2028c\r\n", parked=False
    )


def at_hand(outbox: Outbox, speaker: str = "a/0") -> list[Observation]:
    return list(outbox.at_hand.get(speaker, ()))


class Flood(RuleBasedStateMachine):
    """The model is the plain list of all numbers that are neither acknowledged nor given up."""

    def __init__(self) -> None:
        super().__init__()
        self.place = TemporaryDirectory()
        self.directory = Path(self.place.name, "here")
        self.directory.mkdir()
        self.outbox = Outbox(node="n", boot="0", overflow=self.directory / "overflow", in_memory=IN_MEMORY)
        self.texts: dict[int, str] = {}
        self.made = self.lives = 0

    def teardown(self) -> None:
        self.place.cleanup()

    @initialize(count=st.integers(0, 3 * IN_MEMORY))
    def start(self, count: int) -> None:
        for number in range(count):
            self.see(f"first {number}")

    @rule(text=st.text(max_size=20))
    def see(self, text: str) -> None:
        text = text.encode(errors="replace").decode()
        observation = self.outbox.add(failed(text), at=float(self.made))
        assert observation.seq == self.made
        self.texts[self.made] = text
        self.made += 1

    @rule(data=st.data())
    def acknowledge_some(self, data: st.DataObject) -> None:
        told = [observation.seq for observation in at_hand(self.outbox)]
        done = data.draw(st.lists(st.sampled_from(told))) if told else []
        self.outbox.acknowledge([*done, 10**9])
        for seq in done:
            self.texts.pop(seq, None)

    @rule()
    def disk_breaks_or_is_repaired(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir()
        elif not [*self.directory.iterdir()]:
            self.directory.rmdir()

    @rule()
    def declared_lost(self) -> None:
        self.lives += 1
        self.outbox.start_over(str(self.lives))
        self.texts.clear()
        self.made = 0

    @invariant()
    def the_oldest_are_at_hand_in_order(self) -> None:
        seen = at_hand(self.outbox)
        expected = list(self.texts.items())[: len(seen)]
        assert [(o.seq, o.body.message) for o in seen if isinstance(o.body, RankFailed)] == expected
        assert {o.boot for o in seen} <= {str(self.lives)}
        assert len(self.outbox) == len(self.texts)
        assert len(seen) >= min(len(self.texts), IN_MEMORY // 2)
        assert len(seen) <= IN_MEMORY


TestFlood = Flood.TestCase
TestFlood.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_overflows_comes_back_as_it_was(tmp_path: Path) -> None:
    outbox = Outbox(node="n", boot="b", overflow=tmp_path / "o", in_memory=2)
    made = [outbox.add(body, at=1.5) for body in (failed("x"), failed("y"), failed("schön\n"), FINISHED)]
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size > 0, "it did overflow"
    outbox.acknowledge([0, 1])
    assert [repr(o) for o in at_hand(outbox)] == [repr(o) for o in made[2:]], "NaN included"
    assert not file.exists(), "the file is gone when all is read"


def test_memory_is_bounded(tmp_path: Path) -> None:
    outbox = Outbox(node="n", boot="b", overflow=tmp_path / "o")
    for number in range(5000):
        outbox.add(failed(str(number)), at=0.0)
    assert len(outbox) == 5000
    seen: list[str] = []
    while batch := at_hand(outbox):
        assert len(batch) <= 1000
        seen += [o.body.message for o in batch if isinstance(o.body, RankFailed)]
        outbox.acknowledge(o.seq for o in batch)
    assert seen == [str(number) for number in range(5000)]


def losses(outbox: Outbox) -> list[str]:
    return [o.body.text.partition(" were")[0] for o in at_hand(outbox, "observations_lost")]


def cut(file: Path) -> None:
    with file.open("r+b") as open_file:
        open_file.truncate(100)


def garble(file: Path) -> None:
    file.write_bytes(b"\n".join([b"{"] * 16) + b"\n")


@pytest.mark.parametrize("harm", [cut, garble, Path.unlink])
def test_a_damaged_file_costs_what_was_in_it_and_is_told(tmp_path: Path, harm) -> None:
    """The agent neither dies of it nor falls silent."""
    outbox = Outbox(node="n", boot="b", overflow=tmp_path / "o", in_memory=4)
    for number in range(20):
        outbox.add(failed(str(number)), at=0.0)
    (file,) = tmp_path.iterdir()
    harm(file)
    outbox.acknowledge(range(4))
    assert losses(outbox)[0].endswith("observations of this node")
    later = outbox.add(failed("later"), at=0.0)
    told: list[Observation] = []
    while batch := at_hand(outbox):
        told += batch
        outbox.acknowledge(o.seq for o in batch)
    assert told == [later]


def test_a_file_that_never_runs_empty_does_not_grow_for_ever(tmp_path: Path) -> None:
    spill, line, file = Spill(tmp_path / "o", lost=pytest.fail), b"x" * 10_000, tmp_path / "o"
    for number in range(3000):
        spill.put(b"%d %b" % (number, line))
        if number >= 5:
            (taken,) = spill.take(1)
            assert taken.startswith(b"%d " % (number - 5))
        assert file.stat().st_size <= COMPACT_BYTES + 10 * len(line)
    assert len(spill) == 5


def test_what_neither_disk_nor_memory_has_room_for_is_counted_and_never_how_a_rank_ended(tmp_path: Path) -> None:
    outbox = Outbox(node="n", boot="b", overflow=tmp_path / "nowhere" / "o", in_memory=4)
    for number in range(MOST_UNWRITTEN + 104):
        outbox.add(failed(str(number)), at=0.0)
    end = RankExited(job="a", generation=1, rank=0, pid=1, exit_code=-9, iteration=3)
    outbox.add(end, at=0.0)
    outbox.add(GpuFault(kind="ecc_error", gpu=0, uuid="", evidence="x"), at=0.0)
    assert losses(outbox) == ["1 observations of this node", "10 observations of this node", "100 observations of this node"]
    assert [o.body.kind for o in at_hand(outbox, "gpu_fault")] == ["ecc_error"], "another speaker"
    said: list[Observation] = []
    while batch := at_hand(outbox):
        said += batch
        outbox.acknowledge(o.seq for o in batch)
    assert len(said) == MOST_UNWRITTEN + 4 + 1
    assert said[-1].body == end, "the first words and the last one"
