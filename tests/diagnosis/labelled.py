"""The labelled corpus: logs in the formats of real programs, with what is wrong in each of them.

Written by hand from knowledge of the programs. Rules are written from `dev` and `learnt`. `held_out` measures them: it speaks
in other versions and of other programs. `reserve`, of others again, measures them anew after something was learnt from
`held_out`. `learnt` was a strictly unseen split until its misses were learnt from: 92.5% of its root causes were right before.
`unseen` was written by somebody who had read neither the rules nor the other splits. Nobody who writes rules opens the others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

CORPUS = Path(__file__).parent / "corpus"
LABELS = Path(__file__).parent / "labels.yaml"
UNKNOWN = "unknown"
"""The label of a log that does not tell what was wrong."""

Split = Literal["dev", "held_out", "reserve", "learnt", "unseen"]
SPLITS: tuple[Split, ...] = ("dev", "held_out", "reserve", "learnt", "unseen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The logs of one run. `kind` is an `ErrorKind`, None for a healthy run, or UNKNOWN.

    `sources` are the answers to "whose fault" that are no mistake, `roots` the lines that tell the cause, as file and number.
    """

    name: str
    split: Split
    group: str
    kind: str | None
    sources: frozenset[str]
    paths: tuple[Path, ...]
    roots: frozenset[tuple[str, int]]

    @property
    def is_fault(self) -> bool:
        return self.kind not in {None, UNKNOWN}


def cases(*splits: Split) -> list[Case]:
    """All cases of these splits, in the order of the labels."""
    labels = yaml.safe_load(LABELS.read_text())
    return [_case(name, label) for name, label in labels.items() if name.partition("/")[0] in splits]


def _case(name: str, label: dict) -> Case:
    split = name.partition("/")[0]
    return Case(
        name=name,
        split=split,
        group=label["group"],
        kind=label["kind"],
        sources=frozenset(label["sources"]),
        paths=tuple(CORPUS / split / file for file in label["files"]),
        roots=frozenset((file, number) for file, number in label.get("root", [])),
    )
