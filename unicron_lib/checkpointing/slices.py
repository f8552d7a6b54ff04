"""Parts of tensors: where each lies in the whole one, and what two of them have in common. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

MAX_DIMENSIONS = 64
LARGEST_SIDE = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A box in a tensor of shape `whole`: `offset` is its first element, `size` its own shape.

    Raises ValueError if it sticks out.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.whole) == len(self.offset) == len(self.size) <= MAX_DIMENSIONS:
            raise ValueError("a slice has as many dimensions as its tensor")
        sides = zip(self.whole, self.offset, self.size, strict=True)
        if not all(offset >= 0 and size > 0 and offset + size <= side <= LARGEST_SIDE for side, offset, size in sides):
            raise ValueError(f"there is no slice of {self.size} at {self.offset} in a tensor of {self.whole}")

    @classmethod
    def all_of(cls, whole: Sequence[int]) -> Self:
        """The whole tensor."""
        return cls(whole=tuple(whole), offset=(0,) * len(whole), size=tuple(whole))

    @classmethod
    def part_of(cls, whole: Sequence[int], *, dim: int, number: int, of: int) -> Self:
        """The part `number` of `of` equal ones along a dimension that they divide."""
        side = whole[dim] // of
        offset = tuple(number * side if d == dim else 0 for d in range(len(whole)))
        return cls(whole=tuple(whole), offset=offset, size=tuple(side if d == dim else s for d, s in enumerate(whole)))

    @property
    def num_elements(self) -> int:
        """Elements in it."""
        return math.prod(self.size)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.size == self.whole

    def meet(self, other: Self) -> Self | None:
        """What both have of the same tensor, None if nothing."""
        if self.whole != other.whole:
            return None
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(map(min, self._ends, other._ends))
        if not all(begin < end for begin, end in zip(first, last, strict=True)):
            return None
        size = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return type(self)(whole=self.whole, offset=first, size=size)

    def within(self, other: Self) -> tuple[slice, ...]:
        """How to index it in a tensor that holds `other`, of which it is a part."""
        begins = (mine - its for mine, its in zip(self.offset, other.offset, strict=True))
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.size, strict=True))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offset, self.size, strict=True))


def are_apart(slices: Sequence[TensorSlice]) -> bool:
    """Whether slices are of the same tensor and have no element in common: cut along one dimension, as all layouts do."""
    if len({piece.whole for piece in slices}) != 1:
        return False
    cut = {
        dim for piece in slices for dim, (size, side) in enumerate(zip(piece.size, piece.whole, strict=True)) if size != side
    }
    if len(slices) == 1:
        return True
    if len(cut) != 1:
        return False
    (dim,) = cut
    spans = sorted((piece.offset[dim], piece.offset[dim] + piece.size[dim]) for piece in slices)
    return all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def covered(wanted: TensorSlice, pieces: Sequence[TensorSlice]) -> int:
    """How many elements of `wanted` pieces that are apart have."""
    met = (wanted.meet(piece) for piece in pieces)
    return sum(piece.num_elements for piece in met if piece)
