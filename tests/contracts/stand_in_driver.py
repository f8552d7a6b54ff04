"""Builds the stand-in for NVIDIA's library from its C source; whoever loads it has its folder in LD_LIBRARY_PATH."""

import shutil
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest

CURRENT = ("-DWITH_REMAPPED_ROWS", "-DWITH_EVENTS")
"""For the library of a current driver; without them, an old one's."""


def include_folder() -> Path:
    header = next(file for file in files("nvidia-nvml-dev") or () if file.name == "nvml.h")
    return Path(str(header.locate())).parent


def build(folder: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    source = Path(__file__).with_name("nvml_stand_in.c")
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror", f"-I{include_folder()}", *options]
    subprocess.run([compiler, *flags, str(source), "-o", str(folder / "libnvidia-ml.so.1")], check=True)
    return folder


def write(state: Path, text: str) -> None:
    """Change the state at once: the stand-in reads the file whenever it is asked."""
    new = state.with_suffix(".new")
    new.write_text(text)
    new.replace(state)


def xid(state: Path, gpu: int, number: int) -> None:
    """Let the driver report an Xid now."""
    with state.with_name(f"{state.name}.events").open("a") as events:
        events.write(f"{gpu} {number}\n")


def no_driver(folder: Path) -> Path:
    """A folder whose library cannot be loaded: shadows a real one, on machines that have it."""
    (folder / "libnvidia-ml.so.1").write_text("not a library")
    return folder
