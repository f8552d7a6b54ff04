"""Observations reach the journal exactly once, whatever breaks on the way."""

from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.agent.window import Window
from unicron_lib.controller.observations import PendingObservations

BODY = RankFinished(job="a", generation=1, rank=0, iteration=1, loss=1.0)
STEPS = ("seen", "told", "reconnected", "controller_died", "journalled", "ack_lost")


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_each_observation_is_journalled_exactly_once(story: list[str]) -> None:
    outbox, pending = Outbox(node="n", boot="b"), PendingObservations()
    journal: list[str] = []
    window, made = Window(outbox), 0
    for step in [*story, "controller_died", "told", "journalled", "reconnected", "told", "journalled"]:
        match step:
            case "seen":
                outbox.add(BODY, at=0.0)
                made += 1
            case "told":
                for observation in window.take():
                    if not pending.add(observation, now=0.0):
                        window.acknowledge([observation.seq])
            case "reconnected":
                window = Window(outbox)
            case "controller_died":
                pending, window = PendingObservations(), Window(outbox)
            case "journalled" | "ack_lost":
                waiting = pending.select(now=0.0)
                journal += [o.id for o in waiting if o.id not in journal]  # as the journal does: once under an id
                done = pending.acknowledge(o.id for o in waiting)
                if step == "journalled":
                    window.acknowledge(o.seq for o in done)
    assert journal == [f"n/b/{seq}" for seq in range(made)]
    assert len(outbox) == 0
