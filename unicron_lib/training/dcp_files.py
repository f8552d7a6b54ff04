"""Tensors out of a folder that torch's distributed checkpointing wrote, by its own reader; the folder is not trusted.

torch's reader unpickles `.metadata`, follows its paths, and believes its sizes. Here `.metadata` is read inert (see
`inert_pickle`), what it says is checked against the files, and only then handed to the reader; objects, which are pickles
as well, are never read. Tensors it reads with `weights_only`. What torch does not notice is: flipped bits, by the CRC32 of
each tensor's archive, and places of a tensor that no part fills.
"""

import io
import math
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from unicron_lib.checkpointing.inert_pickle import Made, Named, read_inert
from unicron_lib.checkpointing.tensors import NAMES
from unicron_lib.errors import CheckpointError

METADATA = ".metadata"
LARGEST_METADATA = 1 << 30
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
DTYPES = {str(dtype): dtype for dtype in NAMES if dtype.is_floating_point}
"""What a parameter or a moment may be of."""
_SHAPE = "torch.Size"
_Place = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of the folder: its shape, dtype, and the parts that it lies in, as pairs of offset and shape."""

    shape: _Place
    dtype: torch.dtype
    parts: tuple[tuple[_Place, _Place], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Folder:
    """A checkpoint's folder: `tensors` says what floating-point tensors it has, `keys` all that it has."""

    def __init__(self, path: Path) -> None:
        """Read what is there; raises CheckpointError if that is no checkpoint of torch's, or damaged."""
        self._path = path
        told = _read_metadata(path)
        self._sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        described = _mapping(told.get("state_dict_metadata"), self._origin)
        self._storage = _mapping(told.get("storage_data"), self._origin)
        self.keys = frozenset(key for key in described if isinstance(key, str))
        found = {key: self._stored(key, value) for key, value in described.items() if _is_tensor(value)}
        self.tensors: Mapping[str, Stored] = {key: stored for key, stored in found.items() if stored is not None}
        self._places: dict[tuple[str, _Place], _StorageInfo] | None = None

    @property
    def _origin(self) -> str:
        return str(self._path / METADATA)

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """These tensors, whole; raises CheckpointError if one is damaged, has a part missing, or holds a nan."""
        wanted = {key: self.tensors[key] for key in keys}
        # what no part fills stays nan, and a state that holds one is of no use either
        state = {key: torch.full(it.shape, math.nan, dtype=it.dtype) for key, it in wanted.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process only
                load(state, storage_reader=_Reader(self._path, self._metadata(wanted)), no_dist=True)
        except CheckpointException as error:  # a BaseException
            first = next(iter(error.failures.values()), (error,))[0]
            raise CheckpointError(_told(self._path, first)) from error
        except Exception as error:
            raise CheckpointError(_told(self._path, error)) from error
        spoilt = next((key for key, tensor in state.items() if bool(tensor.isnan().any())), None)
        if spoilt is not None:
            raise CheckpointError(f"{self._path}: the tensor {spoilt} has places that are nan, or in none of its parts")
        return state

    # --- what .metadata says -------------------------------------------------------------------------------------------

    def _stored(self, key: object, value: Made) -> Stored | None:
        """What is said of a tensor, None if it is of integers."""
        state = _state(value)
        properties = state.get("properties")
        kind = properties.state if isinstance(properties, Made) else None
        dtype = kind[0] if isinstance(kind, tuple) and kind else None
        if not isinstance(dtype, Named) or dtype.name not in DTYPES:
            return None
        chunks = state.get("chunks")
        if not isinstance(key, str) or not isinstance(chunks, list):
            raise CheckpointError(f"{self._origin} is damaged: what it says of {str(key)[:100]!r} cannot be")
        places = [(_state(it).get("offsets"), _state(it).get("sizes")) for it in chunks]
        parts = tuple((self._numbers(offset, key), self._numbers(size, key)) for offset, size in places)
        stored = Stored(shape=self._numbers(state.get("size"), key), dtype=DTYPES[dtype.name], parts=parts)
        self._refuse_other_volumes(key, stored)
        return stored

    def _numbers(self, value: object, key: str) -> _Place:
        match value:
            case Made(what=Named(name=name), arguments=((*numbers,),)) if name == _SHAPE and len(numbers) < 16:
                place = tuple(number for number in numbers if type(number) is int and 0 <= number < 1 << 48)
                if len(place) == len(numbers):
                    return place
        raise CheckpointError(f"{self._origin} is damaged: what it says of {key[:100]!r} cannot be")

    def _refuse_other_volumes(self, key: str, stored: Stored) -> None:
        rank = len(stored.shape)
        fits = all(
            len(offset) == len(size) == rank
            and all(o + s <= most for o, s, most in zip(offset, size, stored.shape, strict=True))
            for offset, size in stored.parts
        )
        if not fits or sum(math.prod(size) for _, size in stored.parts) != math.prod(stored.shape):
            raise CheckpointError(f"{self._origin}: the parts of {key[:100]} do not make up the tensor of {stored.shape}")

    def _metadata(self, wanted: Mapping[str, Stored]) -> Metadata:
        described: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for key, stored in wanted.items():
            chunks = [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size)) for at, size in stored.parts]
            properties = TensorProperties(dtype=stored.dtype)
            described[key] = TensorStorageMetadata(properties=properties, size=torch.Size(stored.shape), chunks=chunks)
            for offset, _ in stored.parts:
                storage[MetadataIndex(key, offset)] = self._place(key, offset)
        return Metadata(state_dict_metadata=described, storage_data=storage, storage_meta=StorageMeta())

    def _place(self, key: str, offset: _Place) -> _StorageInfo:
        if self._places is None:
            self._places = dict(self._all_places())
        if (key, offset) not in self._places:
            raise CheckpointError(f"{self._origin}: a part of {key} is in no file")
        return self._places[key, offset]

    def _all_places(self) -> Iterable[tuple[tuple[str, _Place], _StorageInfo]]:
        for index, info in self._storage.items():
            at, place = _state(index), _state(info)
            key, offset = at.get("fqn"), at.get("offset")
            if isinstance(key, str) and key in self.tensors and offset is not None:
                yield (key, self._numbers(offset, key)), self._checked(key, place)

    def _checked(self, key: str, place: Mapping[Any, Any]) -> _StorageInfo:
        """Where a part lies, if that is in a file of this folder, and inside it."""
        match place:
            case {"relative_path": str(name), "offset": int(first), "length": int(length)} if FILE.fullmatch(name):
                size = self._sizes.get(name)
                if size is None:
                    raise CheckpointError(f"{self._path}: {name} is missing")
                if first < 0 or length <= 0 or first + length > size:
                    raise CheckpointError(
                        f"{self._path / name} is cut off: it has {size} bytes, {key} ends at {first + length}"
                    )
                if not place.get("transform_descriptors"):
                    return _StorageInfo(relative_path=name, offset=first, length=length)
        raise CheckpointError(f"{self._origin} is refused: it has no place inside the folder for {key}, or a compressed one")


class _Reader(FileSystemReader):
    """torch's reader, with the metadata given, of archives whose checksums are right."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._given = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._given

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        file.seek(sinfo.offset)
        archive = io.BytesIO(file.read(sinfo.length))
        with zipfile.ZipFile(archive) as opened:
            if (entry := opened.testzip()) is not None:
                raise CheckpointError(f"{sinfo.relative_path} is damaged: {entry} has another CRC32 than was written")
        archive.seek(0)
        return archive


def _read_metadata(path: Path) -> Mapping[Any, Any]:
    file = path / METADATA
    try:
        if file.stat().st_size > LARGEST_METADATA:
            raise CheckpointError(f"{file} is refused: it has {file.stat().st_size} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is no checkpoint of torch_dist: {METADATA} cannot be read ({error.strerror})") from error
    return _state(read_inert(data, origin=str(file)))


def _state(value: object) -> Mapping[Any, Any]:
    """The attributes that an object would have had."""
    match value:
        case Made(state=dict(state)) | Made(state=(None, dict(state))):
            return state
    return {}


def _mapping(value: object, origin: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{origin} is damaged: it does not say what the checkpoint holds")
    return value


def _is_tensor(value: object) -> bool:
    return isinstance(value, Made) and value.name.rpartition(".")[2] == "TensorStorageMetadata"


def _told(path: Path, error: object) -> str:
    words = " ".join(str(error).split())[:300]
    return f"{path} cannot be read: {words or type(error).__name__}"
