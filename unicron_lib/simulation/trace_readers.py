"""Converters: published traces of machines as traces of ours.

`stepfun` reads the node faults of StepFun's InfiniteHBD-Trace (JSON), `spot_events` Bamboo's EC2 traces (lines of
milliseconds, add or remove, node), `spot_counts` its Google Cloud traces (lines of date, time, available nodes).
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.errors import UserError
from unicron_lib.simulation import traces
from unicron_lib.simulation.closed_forms import DAY_S
from unicron_lib.simulation.faults import Fault, Trace

STEPFUN_NODES = 400
"""Servers of StepFun's cluster; those without a fault are not in its trace."""

_WORDS: Mapping[str, ErrorKind] = MappingProxyType(
    {
        "bit ecc": ErrorKind.ECC_ERROR,
        "gpu lost": ErrorKind.GPU_LOST,
        "device not found": ErrorKind.GPU_LOST,
        "nvidia-smi timeout": ErrorKind.GPU_DRIVER_ERROR,
        "p2p bandwidth": ErrorKind.NVLINK_ERROR,
    }
)
"""By words of StepFun's descriptions. Whatever else took a server out of use is a lost node to its jobs."""


def stepfun(path: Path, *, num_nodes: int = STEPFUN_NODES, seed: int = 0) -> Trace:
    """StepFun's faults: each takes its server until it ends.

    Servers have no order: `seed` draws their numbers below `num_nodes`, those without a fault included. A fault within
    another one of its server prolongs it. Raises UserError for another format or more servers than `num_nodes`.
    """
    entries = traces.read_json(path, traces.read_text(path))
    spells, kinds = _stepfun_spells(path, entries)
    if len(spells) > num_nodes:
        raise UserError(f"{path} has faults of {len(spells)} servers, more than {num_nodes} nodes")
    numbers = random.Random(seed).sample(range(num_nodes), len(spells))  # noqa: S311 no secret
    faults = (
        Fault(at_s=since, kind=kinds[server, since], node=node, repair_s=until - since)
        for node, (server, held) in zip(numbers, spells.items(), strict=True)
        for since, until in _joined(held)
    )
    return _trace(path, "StepFun InfiniteHBD-Trace", faults, max(until for held in spells.values() for _, until in held))


def spot_events(path: Path) -> Trace:
    """Bamboo's EC2 trace: a node that is removed is a fault of its slot, and the next one added is its repair.

    There are as many slots as there ever were nodes at once, and a slot that is not filled yet counts as lost.
    Raises UserError for another format.
    """
    moves: list[tuple[float, int]] = []
    present: set[str] = set()
    for number, cells in _lines(path, 3):
        time, verb, node = cells
        if verb not in {"add", "remove"} or (node in present) is (verb == "add"):
            raise UserError(f"{path}, line {number}: {node} cannot be {verb!r} here, a line is milliseconds,add|remove,node")
        present ^= {node}
        moves.append((_number(path, number, float, time) / 1000, 1 if verb == "add" else -1))
    return _slots(path, "Bamboo's EC2 trace", _ordered(path, moves))


def spot_counts(path: Path) -> Trace:
    """Bamboo's Google Cloud trace of how many nodes there were, as `spot_events`. Raises UserError for another format."""
    seen: dict[float, int] = {}
    for number, cells in _lines(path, 3):
        moment = _number(path, number, datetime.fromisoformat, f"{cells[0]} {cells[1]}+00:00")
        seen[moment.timestamp()] = _number(path, number, int, cells[2])
    steps = sorted(seen.items())
    changes = [(steps[0][0], steps[0][1]), *((at, new - old) for (_, old), (at, new) in pairwise(steps))]
    return _slots(path, "Bamboo's Google Cloud trace", [*changes, (steps[-1][0], 0)])


READERS: Mapping[str, Callable[[Path], Trace]] = MappingProxyType(
    {"unicron": traces.read, "stepfun": stepfun, "spot-events": spot_events, "spot-counts": spot_counts}
)
"""By the name of the format."""


def read_any(path: Path) -> Trace:
    """The trace in a file of any format known here, told by how it begins. Raises UserError for a file of none."""
    start = traces.read_text(path).lstrip()[:4096]
    first = [cell.strip() for cell in start.split("\n", 1)[0].split(",")]
    if start.startswith("["):
        return stepfun(path)
    if len(first) == 3 and first[1] in {"add", "remove"}:
        return spot_events(path)
    if len(first) == 3 and first[1].count(":") == 2:
        return spot_counts(path)
    return traces.read(path)


def first_nodes(trace: Trace, num_nodes: int) -> Trace:
    """The faults of its first `num_nodes` nodes, for a smaller cluster."""
    faults = tuple(fault for fault in trace.faults if fault.node < num_nodes)
    return Trace(name=trace.name, source=trace.source, duration_s=trace.duration_s, faults=faults)


def _trace(path: Path, source: str, faults: Iterable[Fault], duration_s: float) -> Trace:
    ordered = tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.node)))
    return Trace(name=path.stem, source=source, duration_s=duration_s, faults=ordered)


Read = TypeVar("Read")
Spells = dict[str, list[tuple[float, float]]]


def _stepfun_spells(path: Path, entries: Any) -> tuple[Spells, dict[tuple[str, float], ErrorKind]]:
    """From when to when each server was out of use, in seconds, and what began it."""
    spells: Spells = {}
    kinds: dict[tuple[str, float], ErrorKind] = {}
    begun: dict[tuple[str, str], list[float]] = {}
    try:
        for entry in sorted(entries, key=lambda entry: float(entry["event_time"])):
            server, at_s = str(entry["node_id"]), float(entry["event_time"]) * DAY_S
            what = json.dumps(entry["fault_type"], sort_keys=True)
            if entry["event_type"] == "fault_start":
                kinds.setdefault((server, at_s), _kind(what))
                begun.setdefault((server, what), []).append(at_s)
            else:
                spells.setdefault(server, []).append((begun[server, what].pop(0), at_s))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{path} is no list of fault_start and fault_end events with node_id, event_time and fault_type"
        ) from error
    if not spells:
        raise UserError(f"{path} holds no fault that ends")
    return spells, kinds


def _kind(what: str) -> ErrorKind:
    text = what.lower()
    return next((kind for words, kind in _WORDS.items() if words in text), ErrorKind.NODE_LOST)


def _joined(spells: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spells."""
    union: list[tuple[float, float]] = []
    for since, until in sorted(spells):
        if union and since <= union[-1][1]:
            union[-1] = (union[-1][0], max(until, union[-1][1]))
        else:
            union.append((since, until))
    return union


def _lines(path: Path, num_cells: int) -> Iterable[tuple[int, list[str]]]:
    numbered = [(number, line) for number, line in enumerate(traces.read_text(path).splitlines(), start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{path} is empty")
    for number, line in numbered:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != num_cells:
            raise UserError(f"{path}, line {number}: found {len(cells)} cells, a line has {num_cells}")
        yield number, cells


def _number(path: Path, line: int, reads: Callable[[str], Read], text: str) -> Read:
    try:
        return reads(text)
    except ValueError as error:
        raise UserError(f"{path}, line {line}: {error}") from error


def _ordered(path: Path, changes: Sequence[tuple[float, int]]) -> Sequence[tuple[float, int]]:
    times = [at_s for at_s, _ in changes]
    if times != sorted(times):
        raise UserError(f"{path} is not in the order of time")
    return changes


def _slots(path: Path, source: str, changes: Sequence[tuple[float, int]]) -> Trace:
    """The faults of as many slots as are ever filled at once."""
    start, end = changes[0][0], changes[-1][0]
    filled, most = 0, 0
    for _, change in changes:
        filled += change
        most = max(most, filled)
    # the slot that has been empty for longest is filled first
    empty = [(start, slot) for slot in range(most)]
    full = list[int]()
    faults = list[Fault]()
    for at_s, change in changes:
        for _ in range(change):
            since, slot = heappop(empty)
            faults += _absence(slot, since - start, at_s - start)
            full.append(slot)
        for _ in range(-change):
            heappush(empty, (at_s, full.pop(0)))
    for since, slot in empty:
        faults += _absence(slot, since - start, end - start)
    return _trace(path, source, faults, end - start)


def _absence(slot: int, since_s: float, until_s: float) -> list[Fault]:
    if until_s <= since_s:
        return []
    return [Fault(at_s=since_s, kind=ErrorKind.PREEMPTED, node=slot, repair_s=until_s - since_s)]
