"""What a checkpoint consists of: the manifest, whose presence is what makes a checkpoint exist."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from unicron_lib.checkpointing.slices import TensorSlice, are_apart
from unicron_lib.domain.jobs import NAME
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError

WHOLE: Literal[1] = 1
SLICED: Literal[2] = 2
NEWEST_FORMAT = SLICED
"""Format 1 has every tensor whole. In format 2 each shard says where its tensors lie in the whole ones."""
LATER_FORMAT = "written by a later version of Unicron"
LARGEST = 10**10 - 1
LARGEST_BYTES = 1 << 60
LONGEST_REASON = 400
LATEST = 253402300800.0
"""The end of the year 9999, beyond which dates cannot be told."""
SHA256 = re.compile(r"[0-9a-f]{64}")
TENSOR = re.compile(r"[A-Za-z0-9_.]{1,500}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One object of a checkpoint: a safetensors file that holds `tensors`, each whole, or the one of `slices` that it names."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    key: str
    num_bytes: int
    sha256: str
    tensors: tuple[str, ...]
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.num_bytes <= LARGEST_BYTES or not SHA256.fullmatch(self.sha256):
            raise ValueError(f"shard {self.key!r} has {self.num_bytes} bytes and the digest {self.sha256[:70]!r}")
        if not self.tensors or not all(TENSOR.fullmatch(name) for name in self.tensors):
            raise ValueError(f"shard {self.key!r} has no tensors, or some with impossible names")
        if self.slices and self.slices.keys() != set(self.tensors):
            raise ValueError(f"shard {self.key!r} has slices of other tensors than it holds")

    @property
    def folder(self) -> str:
        """The prefix that the shards of its save share."""
        return f"{self.key.rpartition('/')[0]}/"

    def lacks(self, size: int | None) -> str:
        """Why an object of that size (None: there is none) cannot be this shard; empty if it can."""
        if size is None:
            return f"shard {self.key} is missing"
        return "" if size == self.num_bytes else f"shard {self.key} is damaged: it has {size} of {self.num_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint: the state of `job` after `iteration` (0-based), written by ranks of `generation`.

    `loss` is that iteration's, the mean over its global batch.
    `layout` is the one that it was saved with; any other may load it. `committed_at` is its writer's clock, epoch seconds;
    `blocking_s` how long training stood still for it, `upload_s` how long the rest took; 0 if that was not measured.
    Raises ValueError if the parts contradict each other or a shard lies outside the job's own keys.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    job: str
    generation: int
    iteration: int
    loss: float
    consumed_samples: int
    layout: Layout
    shards: tuple[Shard, ...]
    committed_at: float = 0.0
    blocking_s: float = 0.0
    upload_s: float = 0.0
    format: Literal[1, 2] = WHOLE

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.job):
            raise ValueError(f"{self.job[:80]!r} is no job's name")
        if min(self.generation, self.iteration, self.consumed_samples) < 0 or not self.shards:
            raise ValueError("a manifest has shards, and no negative generation, iteration or number of samples")
        sizes = (self.layout.tp, self.layout.pp, self.layout.dp)
        if max(self.generation, self.iteration, *sizes) > LARGEST or min(sizes) < 1:
            raise ValueError("a generation, iteration or layout is out of bounds")
        if not math.isfinite(self.loss):
            raise ValueError(f"the loss is {self.loss}")
        if not all(0 <= time < LATEST for time in (self.committed_at, self.blocking_s, self.upload_s)):
            raise ValueError("a time is out of bounds")
        inside = re.compile(rf"jobs/{self.job}/shards/[A-Za-z0-9_-]{{1,180}}/[A-Za-z0-9_-]{{1,180}}\.safetensors")
        outside = [shard.key[:80] for shard in self.shards if not inside.fullmatch(shard.key)]
        if outside:
            raise ValueError(f"shards outside the job's own keys: {', '.join(map(repr, outside))}")
        self._check_tensors()

    def _check_tensors(self) -> None:
        if any(bool(shard.slices) != (self.format == SLICED) for shard in self.shards):
            raise ValueError(f"format {SLICED} says of every tensor where it lies, format {WHOLE} of none")
        names = [name for shard in self.shards for name in shard.tensors]
        if self.format == WHOLE and len(names) != len(set(names)):
            raise ValueError("a tensor is in two shards")
        together: dict[str, list[TensorSlice]] = {}
        for name, piece in (entry for shard in self.shards for entry in shard.slices.items()):
            together.setdefault(name, []).append(piece)
        wrong = next((name for name, pieces in together.items() if not are_apart(pieces)), None)
        if wrong:
            raise ValueError(f"the slices of {wrong} contradict each other")

    @property
    def key(self) -> str:
        """The key that it is stored under: numbers are inverted, so that the newest is the first one listed."""
        numbers = f"{LARGEST - self.iteration:010d}-{LARGEST - self.generation:010d}"
        return f"jobs/{self.job}/manifests/{numbers}.json"

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)


def parse_key(job: str, key: str) -> tuple[int, int]:
    """Iteration and generation of the manifest that `key` names; raises CheckpointError if it is none of `job`."""
    match = re.fullmatch(rf"jobs/{re.escape(job)}/manifests/([0-9]{{10}})-([0-9]{{10}})\.json", key)
    if not match:
        raise CheckpointError(f"{key[:200]!r} is no checkpoint of job {job}")
    return LARGEST - int(match[1]), LARGEST - int(match[2])


_manifest: TypeAdapter[Manifest] = TypeAdapter(Manifest)
_shard: TypeAdapter[Shard] = TypeAdapter(Shard)


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON; the same bytes for the same manifest. One of format 1 is what earlier versions can read."""
    left_out = {"shards": {"__all__": {"slices"}}} if manifest.format == WHOLE else None
    return _manifest.dump_json(manifest, indent=1, exclude=left_out)


def format_of(shards: Iterable[Shard]) -> Literal[1, 2]:
    """The format of a manifest of these shards."""
    return SLICED if any(shard.slices for shard in shards) else WHOLE


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest; raises CheckpointError for anything that is not one, however it came there."""
    try:
        return _manifest.validate_json(data)
    except ValidationError as error:
        told = re.search(rb'"format":\s*([0-9]{1,9})\b', data)
        if told and int(told[1]) > NEWEST_FORMAT:
            at_most = f"its format is {int(told[1])}, at most {NEWEST_FORMAT} can be read"
            raise CheckpointError(f"the manifest was {LATER_FORMAT}: {at_most}") from error
        raise CheckpointError(f"the manifest is damaged: {_first(error)}") from error


def dump_shard(shard: Shard) -> bytes:
    """The sidecar of a shard as JSON."""
    return _shard.dump_json(shard, exclude=None if shard.slices else {"slices"})


def parse_shard(data: bytes) -> Shard:
    """Read a sidecar; raises CheckpointError."""
    try:
        return _shard.validate_json(data)
    except ValidationError as error:
        raise CheckpointError(f"a shard's sidecar is damaged: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in detail["loc"])
    return " ".join(f"{place}: {detail['msg']}".removeprefix(": ").split())[:LONGEST_REASON]
