"""The code keeps the shape that style.md asks for: small functions, files of one idea, telling names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(path for part in ("flows", "tasks", "unicron_lib") for path in (ROOT / part).rglob("*.py"))
MAX_FUNCTION_LINES = 45
MAX_FILE_LINES = 350
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function))


def body_lines(function: Function) -> int:
    """Lines from the first statement to the last, without the docstring."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    body = function.body[1:] if has_docstring else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    too_long = {f.name: body_lines(f) for f in functions(path) if body_lines(f) > MAX_FUNCTION_LINES}
    assert not too_long, f"functions of more than {MAX_FUNCTION_LINES} lines: {too_long}"


def test_most_functions_are_short() -> None:
    lengths = sorted(body_lines(function) for path in CODE for function in functions(path))
    assert lengths[len(lengths) * 9 // 10] <= 30


def test_names_say_what_a_file_is_about() -> None:
    named = {path for path in [*CODE, *(ROOT / "tests").rglob("*.py")] if EMPTY_NAMES & {path.stem, path.parent.name}}
    assert not named


def test_body_lines_measures_what_it_says() -> None:
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n\n    return a\n'
    (function,) = (node for node in ast.parse(source).body if isinstance(node, Function))
    assert body_lines(function) == 3
