"""A checkpoint of ours becomes one of Megatron's: a `torch_dist` folder that is there whole, or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.megatron_layout import TRACKER
from unicron_lib.checkpointing.megatron_tracker import look, write_tracker
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import CheckpointError, UserError
from unicron_lib.training.megatron_facts import common_state
from unicron_lib.training.shards import read_state
from unicron_lib.training.torch_dist import MOMENTS, places, write

ORIGIN = "unicron.json"
"""In the folder, beside Megatron's files: which checkpoint it was made of."""


def choose(repository: CheckpointRepository, iteration: int | None) -> tuple[Manifest, dict[str, torch.Tensor], list[str]]:
    """The newest checkpoint of which every byte is right, or the one of `iteration`; its state, and why newer ones are not.

    Raises CheckpointError if there is none.
    """
    skipped: list[str] = []
    condemned = repository.condemned()
    for key in repository.manifest_keys():
        manifest, reason = repository.look_at(key)
        if iteration is not None and (manifest is None or manifest.iteration != iteration):
            continue
        reason = condemned.get(key) or reason
        if manifest is not None and not reason:
            try:
                return manifest, read_state(repository, manifest), skipped
            except CheckpointError as error:
                reason = str(error)
        skipped.append(f"{key}: {reason}")
    which = "no checkpoint" if iteration is None else f"no checkpoint of iteration {iteration}"
    told = f"there is {which} that can be used"
    raise CheckpointError("; ".join([told, *skipped]))


def export(manifest: Manifest, state: Mapping[str, torch.Tensor], spec: JobSpec, directory: Path) -> tuple[Path, bool]:
    """Write the state into its `iter_` folder in the directory, then the tracker; False if that folder was there already.

    Raises UserError if another one is there, or the checkpoint is of another model, CheckpointError if it cannot be written.
    """
    _refuse_another_model(state, spec)
    iterations = manifest.iteration + 1
    target = directory / f"iter_{iterations:07d}"
    origin = _origin(manifest)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_new = not target.exists()
        if is_new:
            _write_whole(target, spec, state, iterations, origin)
        elif _read_origin(target) != origin:
            raise UserError(f"{target} is there already and was not made of {manifest.key}: choose another directory")
        _point_to(directory, iterations)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror or error}") from error
    return target, is_new


def _write_whole(target: Path, spec: JobSpec, state: Mapping[str, torch.Tensor], iterations: int, origin: str) -> None:
    """In a folder beside it that Megatron does not see, renamed when all is on the disk."""
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        beside.chmod(0o777 & ~_umask())
        write(beside, spec, state, iterations=iterations, common=common_state(spec, iterations))
        (beside / ORIGIN).write_text(origin, encoding="utf-8")
        for file in beside.iterdir():
            _to_disk(file)
        _to_disk(beside)
        beside.rename(target)
        _to_disk(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _point_to(directory: Path, iterations: int) -> None:
    """Have Megatron resume from it, unless it would from a later iteration."""
    now = look(directory).resumes_from
    if not isinstance(now, int) or now < iterations:
        write_tracker(directory, str(iterations))


def is_pointed_to(target: Path) -> bool:
    """Whether Megatron would resume from this folder."""
    return (target.parent / TRACKER).read_text(encoding="utf-8").strip() == str(int(target.name.removeprefix("iter_")))


def _origin(manifest: Manifest) -> str:
    told = {"manifest": manifest.key, "sha256": [shard.sha256 for shard in manifest.shards]}
    return json.dumps(told, indent=1)


def _read_origin(target: Path) -> str:
    try:
        return (target / ORIGIN).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return ""


def _refuse_another_model(state: Mapping[str, torch.Tensor], spec: JobSpec) -> None:
    kinds = ("param", *MOMENTS)
    expected = {f"{kind}.{name}": place.shape for name, place in places(spec).items() for kind in kinds}
    wrong = sorted(expected.keys() ^ state.keys()) or [name for name in expected if tuple(state[name].shape) != expected[name]]
    if wrong:
        raise UserError(
            f"the checkpoint is of another model than job {spec.job} has, the first tensor that differs is {wrong[0]}"
        )


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
