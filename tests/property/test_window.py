"""A flood of observations reaches the journal once and in order, and only a windowful of it is ever under way."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.agent.messages import Observation
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.agent.window import Window
from unicron_lib.controller.observations import PendingObservations

SIZE = 4
STEPS = st.sampled_from(["seen", "sent", "arrived", "journalled", "answered", "broke", "controller_died"])


class World:
    """An agent, a connection that may break with everything on it, and a controller that may forget everything."""

    def __init__(self) -> None:
        self.made = 0
        self.outbox, self.pending = Outbox(node="n", boot="b"), PendingObservations()
        self.journal: list[int] = []
        self.broke()

    def seen(self) -> None:
        self.outbox.add(RankFinished(job="a", generation=1, rank=0, iteration=self.made, loss=1.0), at=0.0)
        self.made += 1

    def broke(self) -> None:
        self.window, self.wire, self.answers = Window(self.outbox, size=SIZE), [], []

    def controller_died(self) -> None:
        self.pending = PendingObservations()
        self.broke()

    def sent(self) -> None:
        self.wire += self.window.take()
        assert len(self.wire) + len(self.pending.select(now=0.0)) <= 2 * SIZE

    def arrived(self) -> None:
        if self.wire:
            observation = self.wire.pop(0)
            if not self.pending.add(observation, now=0.0):
                self.answers.append(observation.seq)

    def journalled(self) -> None:
        """The oldest that waits: the journal takes each id once."""
        for observation in self.pending.select(now=0.0)[:1]:
            if observation.seq not in self.journal:
                self.journal.append(observation.seq)
            self.answers += [done.seq for done in self.pending.acknowledge([observation.id])]

    def answered(self) -> None:
        self.window.acknowledge(self.answers)
        self.answers = []


@given(st.lists(STEPS, max_size=200))
def test_nothing_is_lost_told_twice_or_out_of_order(story: list[str]) -> None:
    world = World()
    for step in story:
        getattr(world, step)()
    world.broke()
    while len(world.outbox):
        for step in ("sent", "arrived", "journalled", "answered"):
            getattr(world, step)()
    assert world.journal == list(range(world.made))


@given(st.integers(0, 30), st.integers(1, 8))
def test_no_more_than_a_windowful_is_under_way(num_seen: int, size: int) -> None:
    outbox = Outbox(node="n", boot="b")
    for _ in range(num_seen):
        outbox.add(RankFinished(job="a", generation=1, rank=0, iteration=1, loss=1.0), at=0.0)
    window, sent = Window(outbox, size=size), []
    while taken := window.take():
        assert len(taken) <= size
        assert window.take() == ()
        sent += [observation.seq for observation in taken]
        window.acknowledge(taken[0].seq for _ in range(2))
        assert len(window.take()) <= 1
        window.acknowledge(range(num_seen))
        sent = sorted({*sent, *range(sent[-1] + 1)})
    assert window.take() == ()


def test_a_flood_of_one_rank_hides_nobody_elses_word() -> None:
    """Nobody answers what the flood's job says: of the others, each is heard at once all the same."""
    outbox = Outbox(node="n", boot="b")

    def see(job: str, rank: int) -> None:
        outbox.add(RankFinished(job=job, generation=1, rank=rank, iteration=1, loss=1.0), at=0.0)

    for rank in range(8):
        for _ in range(1000):
            see("loud", rank)
    window = Window(outbox)
    flood = window.take()
    assert len(flood) <= 256, "as many as may be under way"
    assert {o.body.rank for o in flood} == set(range(8))
    for rank in range(3):
        see("calm", rank)
    assert [(o.body.job, o.body.rank) for o in window.take()] == [("calm", 0), ("calm", 1), ("calm", 2)]
    assert window.take() == ()


@given(st.integers(1, 8), st.integers(1, 8), st.lists(st.integers(0, 30), max_size=80))
def test_however_many_speak_what_is_under_way_is_bounded(size: int, share: int, speakers: list[int]) -> None:
    outbox, arrived = Outbox(node="n", boot="b"), list[Observation]()
    for number, rank in enumerate(speakers):
        outbox.add(RankFinished(job="a", generation=1, rank=rank, iteration=number, loss=1.0), at=0.0)
    window = Window(outbox, size=size, share=share)
    while taken := window.take():
        assert len(taken) <= 2 * size
        assert max(Counter(o.body.rank for o in taken).values()) <= share
        arrived += taken
        window.acknowledge(o.seq for o in taken)
    assert len(outbox) == 0
    for rank in set(speakers):
        said = [number for number, who in enumerate(speakers) if who == rank]
        assert [o.body.iteration for o in arrived if o.body.rank == rank] == said
