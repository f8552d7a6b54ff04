"""How right the diagnosis is about labelled logs, and what it takes for what."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from labelled import UNKNOWN, Case

from unicron_lib.diagnosis.diagnose import diagnose_files
from unicron_lib.diagnosis.findings import Diagnosis
from unicron_lib.domain.failures import ErrorKind

HEALTHY = "healthy"
UNTOLD = frozenset({UNKNOWN, ErrorKind.PROCESS_EXIT, ErrorKind.OTHER})
"""What may be said of a job that died without a word: it ended, nobody knows why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said about a case."""

    case: Case
    diagnosis: Diagnosis

    @property
    def said(self) -> str:
        return self.diagnosis.kind or self.diagnosis.verdict

    @property
    def is_right(self) -> bool:
        if self.case.kind == UNKNOWN:
            return self.said in UNTOLD
        return self.said == (self.case.kind or HEALTHY)

    @property
    def blames_hardware_wrongly(self) -> bool:
        return self.diagnosis.source == "infrastructure" and "infrastructure" not in self.case.sources

    @property
    def shows_the_root(self) -> bool:
        """Whether one of the lines that tell the cause is among the evidence."""
        shown = {(line.file.rpartition("/")[2], line.number) for line in self.diagnosis.evidence}
        return bool(shown & self.case.roots)


def answers(cases: Iterable[Case]) -> list[Answer]:
    return [Answer(case=case, diagnosis=diagnose_files(case.paths)) for case in cases]


def share(answers: Sequence[Answer], attribute: str) -> float:
    return sum(getattr(answer, attribute) for answer in answers) / max(1, len(answers))


def report(answers: Sequence[Answer]) -> str:
    """Accuracy and confusion matrix: a row per label, a column per answer, then what was wrong."""
    return "\n".join([*_figures(answers), "", *_matrix(answers), "", *_mistakes(answers)])


def _figures(answers: Sequence[Answer]) -> Iterator[str]:
    faults = [answer for answer in answers if answer.case.is_fault]
    healthy = [answer for answer in answers if answer.case.kind is None]
    untold = [answer for answer in answers if answer.case.kind == UNKNOWN]
    yield f"root causes right          {_of(faults, 'is_right')}"
    yield f"their line is shown        {_of(faults, 'shows_the_root')}"
    yield f"healthy called healthy     {_of(healthy, 'is_right')}"
    yield f"untold left untold         {_of(untold, 'is_right')}"
    yield f"hardware blamed wrongly    {sum(answer.blames_hardware_wrongly for answer in answers)}"


def _of(answers: Sequence[Answer], attribute: str) -> str:
    right = sum(getattr(answer, attribute) for answer in answers)
    return f"{right:3d} of {len(answers):3d} = {share(answers, attribute):6.1%}"


def _matrix(answers: Sequence[Answer]) -> Iterator[str]:
    labels = list(dict.fromkeys(answer.case.kind or HEALTHY for answer in answers))
    columns = [*labels, *sorted({answer.said for answer in answers} - {*labels})]
    counts = Counter((answer.case.kind or HEALTHY, answer.said) for answer in answers)
    yield f"{'labelled as, down; taken for, across':>36}" + "".join(f"{number:4d}" for number in range(1, len(columns) + 1))
    for number, label in enumerate(columns, 1):
        cells = "".join(f"{counts[label, column] or '.':>4}" for column in columns)
        yield f"{number:10d} {label:25}" + (cells if label in labels else "")


def _mistakes(answers: Sequence[Answer]) -> Iterator[str]:
    for answer in answers:
        if not answer.is_right:
            yield f"{answer.case.name}: {answer.case.kind or HEALTHY} taken for {answer.said}"
        elif answer.blames_hardware_wrongly:
            yield f"{answer.case.name}: {answer.case.kind} is said to be the infrastructure's"
        elif answer.case.is_fault and not answer.shows_the_root:
            yield f"{answer.case.name}: {answer.case.kind} is right, its line is not shown"
