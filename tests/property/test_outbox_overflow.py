"""An outbox in the face of a flood: like one that has all the memory in the world, whatever is acknowledged when."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFailed, RankFinished

IN_MEMORY = 4
FINISHED = RankFinished(job="a", generation=1, rank=0, iteration=1, loss=float("nan"))


def failed(text: str) -> RankFailed:
    return RankFailed(
        job="a", generation=1, rank=0, iteration=1, error_type="E", message=text, traceback="a\nb\u2028c\r\n", parked=False
    )


class Flood(RuleBasedStateMachine):
    """The model is the plain list of all numbers that are neither acknowledged nor given up."""

    def __init__(self) -> None:
        super().__init__()
        self.place = TemporaryDirectory()
        self.file = Path(self.place.name, "overflow")
        self.outbox = Outbox(node="n", boot="0", overflow=self.file, in_memory=IN_MEMORY)
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
        told = [observation.seq for observation in self.outbox.pending_from(0)]
        done = data.draw(st.lists(st.sampled_from(told))) if told else []
        self.outbox.acknowledge([*done, 10**9])
        for seq in done:
            self.texts.pop(seq, None)

    @rule()
    def disk_breaks_or_is_repaired(self) -> None:
        parent = self.file.parent
        if parent.exists() and not self.file.exists():
            parent.rmdir()
        elif not parent.exists():
            parent.mkdir()

    @rule()
    def declared_lost(self) -> None:
        self.lives += 1
        self.outbox.start_over(str(self.lives))
        self.texts.clear()
        self.made = 0

    @invariant()
    def the_oldest_are_at_hand_in_order(self) -> None:
        at_hand = self.outbox.pending_from(0)
        expected = list(self.texts.items())[: len(at_hand)]
        assert [(o.seq, o.body.message) for o in at_hand if isinstance(o.body, RankFailed)] == expected
        assert {o.boot for o in at_hand} <= {str(self.lives)}
        assert len(self.outbox) == len(self.texts)
        assert len(at_hand) >= min(len(self.texts), IN_MEMORY // 2)
        assert len(at_hand) <= IN_MEMORY

    @invariant()
    def a_part_is_what_is_asked_for(self) -> None:
        at_hand = self.outbox.pending_from(0)
        middle = at_hand[len(at_hand) // 2].seq if at_hand else 0
        assert self.outbox.pending_from(middle) == tuple(o for o in at_hand if o.seq >= middle)


TestFlood = Flood.TestCase
TestFlood.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_overflows_comes_back_as_it_was(tmp_path: Path) -> None:
    outbox = Outbox(node="n", boot="b", overflow=tmp_path / "o", in_memory=2)
    made = [outbox.add(body, at=1.5) for body in (failed("x"), failed("y"), failed("schön\n"), FINISHED)]
    assert (tmp_path / "o").stat().st_size > 0, "it did overflow"
    outbox.acknowledge([0, 1])
    assert [repr(o) for o in outbox.pending_from(0)] == [repr(o) for o in made[2:]], "NaN included"
    assert not (tmp_path / "o").exists(), "the file is gone when all is read"


def test_memory_is_bounded(tmp_path: Path) -> None:
    outbox = Outbox(node="n", boot="b", overflow=tmp_path / "o")
    for number in range(5000):
        outbox.add(failed(str(number)), at=0.0)
    assert len(outbox) == 5000
    seen: list[str] = []
    while batch := outbox.pending_from(0):
        assert len(batch) <= 1000
        seen += [o.body.message for o in batch if isinstance(o.body, RankFailed)]
        outbox.acknowledge(o.seq for o in batch)
    assert seen == [str(number) for number in range(5000)]
