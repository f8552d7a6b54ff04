"""The faults that can be injected: what each is done to, what its amount means, and where its target is. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Literal

from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.jobs import JobState
from unicron_lib.errors import UserError

Target = Literal["JOB/RANK", "NODE/GPU", "NODE", "no target"]
STORE_DOWN = "store-down"
SPIKE_ITERATIONS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a fault is done to, and what `--amount` means for it: "" if it takes none, else by default `amount`.

    With `at_most` it is a whole number.
    """

    target: Target
    unit: str = ""
    amount: float = 0.0
    at_least: float = 0.0
    at_most: int | None = None


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "crash": Kind(target="JOB/RANK"),
        "oom": Kind(target="JOB/RANK"),
        "exit": Kind(target="JOB/RANK", unit="code", amount=1, at_least=1, at_most=255),
        "hang": Kind(target="JOB/RANK"),
        "slow": Kind(target="JOB/RANK", unit="factor", amount=2.0, at_least=1.0),
        "exception": Kind(target="JOB/RANK"),
        "nan": Kind(target="JOB/RANK"),
        "spike": Kind(target="JOB/RANK", unit="number of iterations", amount=SPIKE_ITERATIONS, at_least=1, at_most=1000),
        "corrupt": Kind(target="JOB/RANK"),
        "ecc": Kind(target="NODE/GPU"),
        "xid": Kind(target="NODE/GPU", unit="Xid number", amount=79, at_least=1, at_most=65535),
        "nvlink": Kind(target="NODE/GPU"),
        "row-remap": Kind(target="NODE/GPU"),
        "gpu-lost": Kind(target="NODE/GPU"),
        "link-flap": Kind(target="NODE"),
        "probe-hang": Kind(target="NODE", unit="number of seconds", amount=60.0, at_least=0.1),
        "node-loss": Kind(target="NODE"),
        "partition": Kind(target="NODE", unit="number of seconds", amount=30.0, at_least=0.1),
        "spot-notice": Kind(target="NODE", unit="number of seconds", amount=120.0, at_least=1.0),
        STORE_DOWN: Kind(target="no target", unit="number of seconds", amount=10.0, at_least=0.1),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """One fault, with everything that has to be known to do it.

    `victim` is what the journal calls its target, as failures name it: `job/rank`, the node, or `store`.
    """

    kind: str
    victim: str
    node: str = ""
    job: str = ""
    rank: int = 0
    gpu: int = 0
    amount: float = 0.0


def kind_of(name: str) -> Kind:
    """The kind of that name. Raises UserError."""
    if name not in KINDS:
        raise UserError(f"unknown fault {name!r}: choose one of {', '.join(KINDS)}")
    return KINDS[name]


def amount_of(name: str, given: float | None) -> float:
    """What `--amount` says, or the default. Raises UserError for one that makes no sense."""
    kind = kind_of(name)
    if given is None:
        return kind.amount
    if not kind.unit:
        raise UserError(f"{name} takes no --amount: leave it out")
    if not isfinite(given) or given < kind.at_least:
        raise UserError(f"--amount {given:g}: give {name} a {kind.unit} of {kind.at_least:g} or more")
    if kind.at_most is not None and (given != int(given) or given > kind.at_most):
        raise UserError(f"--amount {given:g}: {name} takes a whole {kind.unit} from {kind.at_least:g} to {kind.at_most}")
    return given


def text_of(name: str, given: str) -> str:
    """What `--text` says an exception is. Raises UserError unless it is a type's name and a message."""
    kind = given.partition(": ")[0]
    if given and name != "exception":
        raise UserError(f"{name} takes no --text: leave it out")
    if given and not kind.isidentifier():
        raise UserError(f'--text {given!r}: give the type and the message, such as "ConnectionResetError: by a peer"')
    return given


def aim(state: ClusterState, name: str, target: str, amount: float | None = None) -> Harm:
    """The fault `name` at `target`, as the cluster is now. Raises UserError if there is no such thing."""
    kind = kind_of(name)
    value = amount_of(name, amount)
    match kind.target:
        case "JOB/RANK":
            return _at_rank(state, name, target, value)
        case "NODE/GPU":
            return _at_gpu(state, name, target, value)
        case "NODE":
            return Harm(kind=name, victim=_node(state, target), node=target, amount=value)
        case "no target":
            if target:
                raise UserError(f"{name} takes no target: leave {target!r} out")
            return Harm(kind=name, victim="store", amount=value)


def _at_rank(state: ClusterState, name: str, target: str, amount: float) -> Harm:
    job, _, number = target.partition("/")
    found: JobState | None = state.jobs.get(job)
    if found is None or found.assignment is None:
        raise UserError(f"no running job {job!r}: give JOB/RANK, see `unicron jobs`")
    slots = found.assignment.slots
    rank = _number(number)
    if rank is None or rank >= len(slots):
        raise UserError(f"{job} has ranks 0 to {len(slots) - 1}: give JOB/RANK, found {target!r}")
    return Harm(kind=name, victim=f"{job}/{rank}", node=slots[rank].node, job=job, rank=rank, amount=amount)


def _at_gpu(state: ClusterState, name: str, target: str, amount: float) -> Harm:
    node, _, number = target.partition("/")
    num_gpus = state.nodes[_node(state, node)].num_gpus
    gpu = _number(number)
    if gpu is None or gpu >= num_gpus:
        raise UserError(f"{node} has {num_gpus} GPUs, counted from 0: give NODE/GPU, found {target!r}")
    return Harm(kind=name, victim=node, node=node, gpu=gpu, amount=amount)


def _node(state: ClusterState, name: str) -> str:
    if name not in state.nodes:
        raise UserError(f"no node {name!r}: there are {', '.join(sorted(state.nodes)) or 'none'}")
    return name


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
