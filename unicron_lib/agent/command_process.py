"""What a rank of a job with a command does until it is that command: it finds the program and becomes it.

It keeps the process number, the session, the log, and its parent, whose end ends it.
"""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter

from unicron_lib.agent.error_file import leave_error
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UserError

WORKING_DIR = "UNICRON_WORKING_DIR"
PYTHON = frozenset({"python", "python3"})
CANNOT_RUN, NOT_FOUND = 126, 127
"""As shells say it."""
_spec: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)


def main() -> int:
    """Become the job's command; returns an exit code only if that cannot be, with the reason in the error file."""
    words = _spec.validate_json(os.environ["UNICRON_JOB_SPEC"]).command
    try:
        enter(os.environ[WORKING_DIR])
        program = find_program(words)
    except UserError as error:
        return _refuse(str(error), NOT_FOUND)
    try:
        _become(program, words)
    except OSError as error:
        return _refuse(f"{program} cannot be run here: {error.strerror}", CANNOT_RUN)


def enter(directory: str) -> None:
    """Work there from now on; raises UserError if there is no such directory. The job's own is made if it is missing."""
    if not Path(directory).is_absolute():
        where = f"working_dir {directory!r} is relative: relative to what, only `unicron submit FILE` knows"
        raise UserError(f"{where}; give an absolute path")
    try:
        os.chdir(directory)
    except OSError as error:
        raise UserError(f"working_dir {directory} cannot be entered on this node: {error.strerror}") from error
    os.environ["PWD"] = directory


def find_program(words: Sequence[str]) -> str:
    """The path of the program that a command starts with; raises UserError if it, or its script, is not here."""
    is_python = words[0] in PYTHON
    program = sys.executable if is_python else shutil.which(words[0])
    if program is None:
        raise UserError(f"the program {words[0]!r} was not found on this node: install it, or give its path")
    script = words[1] if is_python and len(words) > 1 else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise UserError(f"there is no {script} in {Path.cwd()}: set working_dir, or give the script's absolute path")
    return program


def _become(program: str, words: Sequence[str]) -> NoReturn:
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by what it starts
        signal.signal(ignored, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [program if words[0] in PYTHON else words[0], *words[1:]])  # noqa: S606 - no shell is wanted


def _refuse(sentence: str, code: int) -> int:
    sys.stderr.write(f"{sentence}\n")
    leave_error(f"UserError: {sentence}", "")
    return code
