"""What import-linter cannot see: the standard library, single names, and what is loaded at run time."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"prefect", "torch", "megatron", "cvxpy", "boto3", "botocore", "moto", "scipy"}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Pairs (module, name) of every import of the file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def loaded_after(program: str) -> set[str]:
    """The top-level modules that are loaded once `program` has run."""
    code = f"import sys\ntry:\n    {program}\nexcept SystemExit:\n    pass\nprint('LOADED', *sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    return {module.split(".")[0] for module in line.split()[1:]}


@pytest.mark.parametrize("path", sorted((ROOT / "unicron_lib/domain").rglob("*.py")), ids=lambda path: path.name)
def test_the_domain_knows_the_standard_library_only(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "unicron_lib"}
    assert {module for module, _ in imports(path) if module.split(".")[0] not in allowed} == set()
    ours = {module for module, _ in imports(path) if module.startswith("unicron_lib")}
    assert all(module.startswith(("unicron_lib.domain", "unicron_lib.errors")) for module in ours)


def test_events_are_emitted_in_one_place() -> None:
    code = [path for part in ("flows", "tasks", "unicron_lib") for path in (ROOT / part).rglob("*.py")]
    emitters = {str(path.relative_to(ROOT)) for path in code if any(name == "emit_event" for _, name in imports(path))}
    assert emitters <= {"tasks/events.py"}


@pytest.mark.parametrize(
    "program",
    [
        "import unicron_lib.domain.recovery, unicron_lib.domain.jobs, unicron_lib.domain.events",
        "import unicron_lib.planning.allocation, unicron_lib.planning.planner",
        "import unicron_lib.agent.__main__",
        "from unicron_lib.cli import main; sys.argv = ['unicron', '--help']; main()",
    ],
    ids=["domain", "planning", "agent", "first screen of the command line"],
)
def test_stays_light(program: str) -> None:
    assert loaded_after(program) & HEAVY == set()


def test_heavy_modules_would_be_noticed() -> None:
    assert "botocore" in loaded_after("import botocore.session")


def test_the_checkout_does_not_leak_into_the_import_path() -> None:
    """An editable installation serves the three packages, not whatever lies beside them."""
    code = "import importlib.util as u; import flows, tasks, unicron_lib; print(u.find_spec('tests'), u.find_spec('infra'))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["None", "None"]


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load": "weights_only", "np.load": "", "numpy.load": "", "pandas.read_pickle": "", "pd.read_pickle": ""}
"""Calls that unpickle, and the argument, if there is one, that has them refuse all but plain data."""


def unpickles(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    loading = [call for call in calls if ast.unparse(call.func) in LOADERS]
    return [
        ast.unparse(call)
        for call in loading
        if not any(it.arg == LOADERS[ast.unparse(call.func)] and ast.unparse(it.value) == "True" for it in call.keywords)
    ]


@pytest.mark.parametrize("part", ["flows", "tasks", "unicron_lib"])
def test_nothing_is_ever_unpickled(part: str) -> None:
    """What comes from a store or a network must not be able to run code here."""
    for path in (ROOT / part).rglob("*.py"):
        assert not {module.split(".")[0] for module, _ in imports(path)} & PICKLES, path
        assert not unpickles(path), path


def test_what_unpickles_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("torch.load(f)\ntorch.load(f, weights_only=False)\ntorch.load(f, weights_only=True)\n")
    assert len(unpickles(tmp_path / "a.py")) == 2
