"""The first page of a slot: what of which state is behind it."""

import math
import mmap
import re
import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from unicron_lib.domain.jobs import NAME

Place = tuple[int, int]
"""Generation and iteration: of two slots of a job, the greater place is further."""
HEADER_BYTES = mmap.PAGESIZE
MAGIC = b"UNISLOT1"
LARGEST = 10**10 - 1
TRAVELLED_AT = HEADER_BYTES - 1
"""The byte of a first page that is not 0 if the state behind it is on another node, too."""
PART = re.compile(r"(tp\d{1,6}of\d{1,6}-pp\d{1,6}of\d{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The state of `job` after `iteration` (0-based), which `generation` has applied or loaded; `digest` is of `num_bytes`.

    `loss` is that iteration's, the mean over its global batch. `part` names what of the state it is, "" for all of it. Raises
    ValueError for what cannot be.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    job: str
    generation: int
    iteration: int
    consumed_samples: int
    loss: float
    num_bytes: int
    digest: str
    part: str = ""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        numbers = (self.generation, self.iteration, self.consumed_samples)
        if not NAME.fullmatch(self.job) or not math.isfinite(self.loss) or len(self.digest) > 64:
            raise ValueError("a job's name, loss or digest is impossible")
        if not PART.fullmatch(self.part):
            raise ValueError("the name of a part is impossible")
        if min(numbers) < 0 or max(self.generation, self.iteration) > LARGEST or not 0 < self.num_bytes < 1 << 60:
            raise ValueError("a number is out of bounds")

    @property
    def place(self) -> Place:
        """How far it is."""
        return self.generation, self.iteration


header_json: TypeAdapter[SlotHeader] = TypeAdapter(SlotHeader)


def encode(header: SlotHeader) -> bytes:
    """The first page of a slot."""
    told = header_json.dump_json(header)
    page = MAGIC + len(told).to_bytes(4, "little") + zlib.crc32(told).to_bytes(4, "little") + told
    return page.ljust(HEADER_BYTES, b"\0")


def decode(page: bytes) -> SlotHeader | None:
    """The header on a first page, None if there is none that is whole."""
    length, crc = int.from_bytes(page[8:12], "little"), int.from_bytes(page[12:16], "little")
    told = page[16 : 16 + length]
    if page[:8] != MAGIC or length > TRAVELLED_AT - 16 or zlib.crc32(told) != crc:
        return None
    try:
        return header_json.validate_json(told)
    except ValidationError:
        return None
