"""A rank's state out of the slots of its node: from those parts, of whatever layout, that overlap what the rank is to have."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from unicron_lib.checkpointing.model_state import of_the_state, slices_at
from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.checkpointing.slot_header import Place, SlotHeader
from unicron_lib.checkpointing.slots import ALL, SlotPair
from unicron_lib.checkpointing.tensors import unpack
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.parts import overlapping, place_of
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError
from unicron_lib.training.shards import Slices, State, put_together

Piece = tuple[State, Slices]


@contextmanager
def reading_parts(
    directory: Path, place: Place, part: str, *, kept_in: Layout, spec: JobSpec, wanted: Mapping[str, TensorSlice]
) -> Iterator[tuple[SlotHeader, State]]:
    """What a rank with `part` wants of the state of that place, which replicas of the layout `kept_in` have kept.

    Only what is wanted of the slots is read, and it is to be used in the block: later they may be written to. Raises SlotError
    if one is not there, CheckpointError or UserError if it is of another model.
    """
    with ExitStack() as stack:
        headers, pieces = list[SlotHeader](), list[Piece]()
        for name in overlapping(part, kept_in):
            header, data = stack.enter_context(SlotPair(directory, name, ALL).reading(place))
            headers.append(header)
            pieces.append((unpack(data, f"{directory}/{name}"), _slices_of(name, kept_in, spec)))
        yield headers[0], put_together(_once(map(_checked, pieces)), wanted, str(directory))


def _slices_of(part: str, layout: Layout, spec: JobSpec) -> dict[str, TensorSlice]:
    return of_the_state(slices_at(spec, layout, place_of(part)))


def _checked(piece: Piece) -> Piece:
    tensors, slices = piece
    wrong = sorted(tensors.keys() ^ slices.keys()) or [name for name in tensors if tensors[name].shape != slices[name].size]
    if wrong:
        raise CheckpointError(f"a slot is of another model: {len(wrong)} tensors differ, the first is {wrong[0]}")
    return piece


def _once(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Without what an earlier piece has, too: a tensor that is not cut, the tied embedding. All others are apart."""
    told = set[tuple[str, TensorSlice]]()
    for tensors, slices in pieces:
        yield {name: tensors[name] for name in tensors if (name, slices[name]) not in told}, slices
        told.update(slices.items())
