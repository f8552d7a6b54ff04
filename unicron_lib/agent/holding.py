"""Has ranks park with their state in memory, to live on in another generation; turns every hang into a crash."""

from collections.abc import Iterable
from typing import Literal

from unicron_lib.agent.messages import HoldRanks, StopRanks
from unicron_lib.agent.rank_messages import RankOrder
from unicron_lib.agent.ranks import Phase, Rank
from unicron_lib.agent.supervisor import Supervisor

GENTLE = 2 / 3
"""Of the time that ranks have: if they have not come to an iteration's end together by then, they park where they are."""


async def hold(supervisor: Supervisor, command: HoldRanks) -> tuple[Rank, ...]:
    """The ranks of older generations, each of them parked or gone on return; commands that cannot park may be busy.

    Those are treated as in a job that does not park: drained, unless something has failed.
    """
    everybody = supervisor.ranks.below(command.job, command.below_generation)
    supervisor.kill(rank for rank in _unsettled(everybody) if rank.rank in command.condemned)
    ranks = tuple(rank for rank in everybody if rank.can_park)
    left_s = command.deadline_s
    if not command.abort:
        _ask(ranks, "park")
        for rank in _unsettled(everybody):
            if rank.is_alive and not rank.can_park:
                supervisor.drain(rank)
        await _until_settled(supervisor, everybody, GENTLE * left_s)
        left_s -= GENTLE * left_s
    _ask(ranks, "abort")
    await _until_settled(supervisor, ranks, left_s)
    supervisor.kill(_unsettled(ranks))
    await _until_settled(supervisor, ranks, command.deadline_s)
    for rank in ranks:
        if rank.is_parked:
            rank.held_for = max(rank.held_for, command.below_generation)
    return everybody


def lives_on(rank: Rank, command: StopRanks) -> bool:
    """Whether a rank of an older generation is none of those that are to be ended.

    A plan that was given up may come late: it does not end what a newer one holds.
    """
    kept = rank.held_for == command.below_generation and rank.gpu in command.keep_gpus
    return rank.is_parked and (kept or rank.held_for > command.below_generation)


def _ask(ranks: Iterable[Rank], order: Literal["park", "abort"]) -> None:
    for rank in _unsettled(ranks):
        if rank.is_alive and not rank.asked_to_stop:
            rank.order(RankOrder(order=order))


async def _until_settled(supervisor: Supervisor, ranks: Iterable[Rank], timeout_s: float) -> None:
    await supervisor.bell.until(lambda: not _unsettled(ranks), timeout_s=timeout_s)


def _unsettled(ranks: Iterable[Rank]) -> list[Rank]:
    """Those that may still park, or have ended and may have said something that is not read yet."""
    over = {Phase.FAILED, Phase.DRAINED, Phase.FINISHED}
    return [rank for rank in ranks if not (rank.judged or rank.phase in over or rank.is_parked)]
