"""What the agent tells a rank: torchrun's variables and Unicron's own."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from unicron_lib.agent.beats import BEAT_FILE
from unicron_lib.agent.left_lines import LINES_FILE
from unicron_lib.agent.slot_places import MEMORY_DIR, MEMORY_KEEPS, MEMORY_LAYOUT, MEMORY_SLOT
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout, Place
from unicron_lib.domain.skipping import Ranges
from unicron_lib.errors import UserError

OPTIONAL = (
    *("UNICRON_RESTORE_FROM", "UNICRON_SKIPPED_BATCHES", "UNICRON_MTBF_S", "UNICRON_TP", "UNICRON_PP"),
    *(MEMORY_DIR, MEMORY_SLOT, MEMORY_LAYOUT, MEMORY_KEEPS, BEAT_FILE, LINES_FILE),
)
"""Variables that a generation may lack: those of an earlier one mean nothing in it."""
LOG_FILE = "UNICRON_LOG_FILE"
"""Where a rank's output goes; one that was started writes there already, one that changes its place goes over to it."""
_spec: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)
_ranges: TypeAdapter[Ranges] = TypeAdapter(Ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """One rank's place in one generation of a job. `restore_from` is a manifest's key, None for a fresh start.

    `skipped` are the batches that are left out. In `memory_dir` are the job's slots on this node; if a `memory_slot` is given,
    the slot of that place has the state to begin from, or several if another `memory_layout` has kept it. With `keeps` the rank
    keeps its own there, from 2 on for another node, too. `mtbf_s` is the job's mean time between failures, 0 if not known.
    `tp` and `pp` are the sizes of tensor and pipeline parallelism.
    """

    spec: JobSpec
    generation: int
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    node: str
    run_dir: Path
    agent_socket: str
    store_url: str
    restore_from: str | None = None
    skipped: Ranges = ()
    beat_file: Path | None = None
    lines_file: Path | None = None
    memory_dir: Path | None = None
    memory_slot: tuple[int, int] | None = None
    memory_layout: Layout | None = None
    keeps: int = 0
    mtbf_s: float = 0.0
    tp: int = 1
    pp: int = 1

    @property
    def layout(self) -> Layout:
        """The generation's layout."""
        return Layout(tp=self.tp, pp=self.pp, dp=self.world_size // (self.tp * self.pp))

    @property
    def place(self) -> Place:
        """Where the rank is in it."""
        return self.layout.place(self.rank)

    @property
    def job(self) -> str:
        """The job's name."""
        return self.spec.job


def replace_environment(variables: MutableMapping[str, str], given: Mapping[str, str]) -> RankEnvironment:
    """Make a process's `variables` those of another place in its job; raises UserError as `read_environment` does."""
    for name in OPTIONAL:
        variables.pop(name, None)
    variables.update(given)
    return read_environment(variables)


def read_environment(variables: Mapping[str, str]) -> RankEnvironment:
    """Read a rank's environment variables; raises UserError that names the one that is missing or wrong."""
    try:
        return RankEnvironment(
            spec=_spec.validate_json(variables["UNICRON_JOB_SPEC"]),
            generation=int(variables["UNICRON_GENERATION"]),
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            master_addr=variables["MASTER_ADDR"],
            master_port=int(variables["MASTER_PORT"]),
            node=variables.get("UNICRON_NODE", ""),
            run_dir=Path(variables["UNICRON_RUN_DIR"]),
            agent_socket=variables["UNICRON_AGENT_SOCKET"],
            store_url=variables["UNICRON_STORE_URL"],
            restore_from=variables.get("UNICRON_RESTORE_FROM") or None,
            skipped=_ranges.validate_json(variables.get("UNICRON_SKIPPED_BATCHES", "[]")),
            beat_file=Path(variables[BEAT_FILE]) if variables.get(BEAT_FILE) else None,
            lines_file=Path(variables[LINES_FILE]) if variables.get(LINES_FILE) else None,
            memory_dir=Path(variables[MEMORY_DIR]) if variables.get(MEMORY_DIR) else None,
            memory_slot=_pair(variables.get(MEMORY_SLOT, "")),
            memory_layout=_layout(variables.get(MEMORY_LAYOUT, "")),
            keeps=int(variables.get(MEMORY_KEEPS, "0")),
            mtbf_s=float(variables.get("UNICRON_MTBF_S", 0.0)),
            tp=int(variables.get("UNICRON_TP", "1")),
            pp=int(variables.get("UNICRON_PP", "1")),
        )
    except KeyError as error:
        raise UserError(f"the variable {error.args[0]} is not set: ranks are started by an agent") from error
    except ValidationError as error:
        raise UserError(f"UNICRON_JOB_SPEC or UNICRON_SKIPPED_BATCHES is wrong: {error.errors()[0]['msg']}") from error
    except ValueError as error:
        raise UserError(f"a rank's environment is wrong: {error}") from error


def _pair(told: str) -> tuple[int, int] | None:
    first, _, second = told.partition("/")
    return (int(first), int(second)) if told else None


def _layout(told: str) -> Layout | None:
    sizes = _pair(told)
    return Layout(tp=sizes[0], pp=sizes[1]) if sizes else None
