"""Which ranks compute wrongly, by what each of them says of the same piece of work. Pure.

A wrong result of hardware that reports nothing (silent data corruption) is seen by nothing else: the loss stays plausible, and
the all-reduce gives every rank the same wrong sum. Who is wrong is decided as Megatron's rerun state machine does it, by doing
it again, and in the same way by all ranks, each for itself: what differs each time is a transient error, or a kernel that is
not deterministic, and what is the same each time, but not what the others have, is a permanent one.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class InDoubt:
    """Mixed into the exception that ends a rank whose job has results that cannot be trusted.

    `spoiled` are the first and the last iteration of which that is so. With the `verdict` "exclude" the rank asks for its own
    node to be isolated.
    """

    spoiled: tuple[int, int]
    verdict: Literal["", "exclude"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Digests of a rank's `state`, its parameters and moments, and of the `gradient` that it has computed from it."""

    state: str
    gradient: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank says of the same work, done once or more.

    Only ranks of one `kind` can be expected to agree bit by bit: of hardware, software, and part of a state. `is_off` is the
    word of one that knows already that this job's kernels are not deterministic.
    """

    kind: str
    results: tuple[Result, ...]
    is_off: bool = False


class Outcome(StrEnum):
    """What has come of it."""

    FINE = "all agree"
    WRONG = "some are known to be wrong"
    UNDETERMINED = "some are wrong, and nobody knows who"
    NOT_DETERMINISTIC = "nothing can be said: the kernels are not deterministic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome, and the ranks that are `wrong`, each with the reason."""

    outcome: Outcome
    wrong: Mapping[int, str] = field(default_factory=dict)


Said = Mapping[int, Sequence[Result]]
"""What ranks that are alike say, by rank."""
GRAVEST_FIRST = (Outcome.WRONG, Outcome.UNDETERMINED, Outcome.NOT_DETERMINISTIC, Outcome.FINE)


def all_agree(told: Sequence[Told]) -> bool:
    """Whether nobody differs from another one of its kind."""
    return all(len({told[rank].results for rank in group}) == 1 for group in _groups(told))


def judge(told: Sequence[Told], *, replica_size: int = 1) -> Finding:
    """Who is wrong, given what every rank says, by rank, after it has done the work several times, all equally often.

    States first: from different states follow different gradients, also those of the other ranks of a replica.
    """
    groups = [{rank: told[rank].results for rank in group} for group in _groups(told)]
    by_state = [_judge_states(group) for group in groups]
    misled = {rank // replica_size for finding in by_state for rank in finding.wrong}
    found = [
        states if states.outcome is not Outcome.FINE else _judge_gradients(_without(group, misled, replica_size))
        for group, states in zip(groups, by_state, strict=True)
    ]
    outcome = min((finding.outcome for finding in found), key=GRAVEST_FIRST.index, default=Outcome.FINE)
    return Finding(outcome=outcome, wrong={rank: why for finding in found for rank, why in finding.wrong.items()})


def _without(group: Said, replicas: Collection[int], replica_size: int) -> Said:
    return {rank: results for rank, results in group.items() if rank // replica_size not in replicas}


def _groups(told: Sequence[Told]) -> list[list[int]]:
    """The ranks by kind; who is the only one of its kind has nobody to compare itself with."""
    kinds = dict.fromkeys(one.kind for one in told)
    groups = ([rank for rank, one in enumerate(told) if one.kind == kind] for kind in kinds)
    return [group for group in groups if len(group) > 1]


def _judge_states(said: Said) -> Finding:
    """To read a state takes no kernel that might differ."""
    found = _outvoted(
        {rank: [result.state for result in each] for rank, each in said.items()},
        unsteady="its parameters change while nobody writes to them",
        outvoted="its parameters are not those of",
    )
    return Finding(outcome=Outcome.UNDETERMINED) if found.outcome is Outcome.NOT_DETERMINISTIC else found


def _judge_gradients(said: Said) -> Finding:
    return _outvoted(
        {rank: [result.gradient for result in each] for rank, each in said.items()},
        unsteady="unlike most ranks it does not get the same gradient each time",
        outvoted="each time its gradient is not that of",
    )


def _outvoted(said: Mapping[int, Sequence[str]], *, unsteady: str, outvoted: str) -> Finding:
    """Who differs from itself or from a strict majority; nobody, if most differ from themselves."""
    if len(said) < 2:
        return Finding(outcome=Outcome.FINE)
    steady = {rank: each[0] for rank, each in said.items() if len(set(each)) == 1}
    if 2 * len(steady) < len(said):
        return Finding(outcome=Outcome.NOT_DETERMINISTIC)
    wrong = dict.fromkeys(said.keys() - steady.keys(), unsteady)
    votes = Counter(steady.values())
    right, count = votes.most_common(1)[0]
    if 2 * count > len(said):
        why = f"{outvoted} {count} of {len(said)} ranks"
        wrong |= {rank: why for rank, value in steady.items() if value != right}
    if wrong:
        return Finding(outcome=Outcome.WRONG, wrong=wrong)
    return Finding(outcome=Outcome.FINE if len(votes) == 1 else Outcome.UNDETERMINED)
