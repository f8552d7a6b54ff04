"""The cells of a job table, however its scheduler spells them: Acme's traces, `sacct -P`, Kubernetes exports."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

MOST = 1e12
"""No cell holds more than this; what claims to is unreadable."""

BLANK = frozenset({"", "-", "na", "n/a", "nan", "nil", "none", "null", "unknown", "<none>", "(null)"})
"""Cells in lower case that hold nothing."""

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "job_id": ("jobid", "jobidraw", "id", "uid"),
        "user": ("user", "username", "userid", "owner"),
        "name": ("jobname", "name"),
        "type": ("type", "jobtype", "workloadtype", "tasktype", "workload", "partition", "namespace", "qos", "account"),
        "state": ("state", "status", "phase", "jobstate", "finalstate"),
        "gpus": ("gpunum", "numgpus", "gpus", "gpucount", "ngpus", "nvidiacomgpu", "gpu", "alloctres", "reqtres"),
        "duration_s": ("duration", "durations", "elapsedraw", "elapsed", "runtime", "runtimes", "walltime"),
        "queue_s": ("queue", "queues", "queuetime", "queuetimes", "waittime", "pendingtime", "planned"),
        "submitted_at": ("submittime", "submit", "submittedat", "creationtimestamp", "createdat", "createtime"),
        "started_at": ("starttime", "start", "startedat"),
        "ended_at": ("endtime", "end", "endedat", "completiontime", "finishtime", "finishedat"),
        "failed_at": ("failtime", "failedat", "failuretime"),
        "restarted_at": ("restarttime", "restartedat"),
        "reason": ("failurereason", "failreason", "rootcause", "cause", "errorkind", "reason"),
        "category": ("category", "source"),
    }
)
"""Our name of a column -> its names elsewhere in small letters and digits, the best first."""

_CLOCK = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,6}(?:\.\d{1,9})?)")
_UNITS = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
_TRES_GPUS = re.compile(r"(?:\A|,)gres/gpu(:[^=,]{1,64})?=(\d{1,9})(?=,|\Z)")
_SCALES = (86400.0, 3600.0, 60.0, 1.0)


def columns_of(header: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Which columns of `header` hold what, by our names; the best first, those without a match left out."""
    places: dict[str, int] = {}
    for place, title in enumerate(header):
        places.setdefault(re.sub(r"[^a-z0-9]", "", title.lower()), place)
    found = {ours: tuple(places[name] for name in names if name in places) for ours, names in NAMES.items()}
    return {ours: it for ours, it in found.items() if it}


def amount(cell: str) -> float:
    """A number that is not negative. Raises ValueError for anything else."""
    value = float(cell)
    if not 0 <= value <= MOST:
        raise ValueError(cell)
    return value


def gpus(cell: str) -> float:
    """GPUs of a job: a number, or Slurm's trackable resources ("cpu=8,gres/gpu=4"), where none are named for a CPU job."""
    if "=" not in cell:
        return amount(cell)
    found = [(kind, int(count)) for kind, count in _TRES_GPUS.findall(cell)]
    total = [count for kind, count in found if not kind]
    return float(total[0] if total else sum(count for _, count in found))


def seconds(cell: str) -> float:
    """A length of time in seconds: a number of them, Slurm's "1-02:03:04" or Kubernetes' "2h3m". Raises ValueError."""
    if cell[-1].isdigit() and ":" not in cell:
        return amount(cell)
    found = _CLOCK.fullmatch(cell) or _UNITS.fullmatch(cell)
    if found is None:
        return amount(cell)
    return sum(scale * float(part) for scale, part in zip(_SCALES, found.groups(), strict=True) if part)


def moment(cell: str) -> float:
    """A moment in epoch seconds: a number of them, or ISO 8601, in UTC where it names no zone. Raises ValueError."""
    if cell.replace(".", "", 1).isdigit():
        return amount(cell)
    at = datetime.fromisoformat(cell)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def numbers(cells: Iterable[str], parse: Callable[[str], float]) -> tuple[list[float], int]:
    """Every cell as a number, NaN where there is none, and how many of them were not blank and yet unreadable."""
    values: list[float] = []
    num_unreadable = 0
    for cell in cells:
        text = cell.strip()
        try:
            values.append(parse(text) if text else math.nan)
        except (ValueError, OverflowError):
            values.append(math.nan)
            num_unreadable += text.lower() not in BLANK
    return values, num_unreadable


def label(cell: str) -> str:
    """A text, empty where the cell holds nothing."""
    text = cell.strip()
    return "" if text.lower() in BLANK else text[:200]
