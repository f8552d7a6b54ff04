"""The figures in the demo's job files lead to the story that the demo tells, by the paper's objective and by brute force."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from unicron_lib.domain.jobs import JobSpec

JOBS_FOLDER = Path(__file__).parents[2] / "infra/jobs"
MTBF_GPU_S = 6.2e7


def job(name: str) -> JobSpec:
    document = yaml.safe_load((JOBS_FOLDER / f"{name}.yaml").read_text())
    return TypeAdapter(JobSpec).validate_python(document["deployments"][0]["parameters"]["job"])


def gain(spec: JobSpec, *, before: int, after: int, faulted: bool, num_gpus: int) -> float:
    """G(t, x') of the paper, in FLOP."""
    flops = {0: 0.0, **spec.throughput_flops}
    moved = after != before or faulted
    lost = flops[before] * spec.transition_s if moved else 0.0
    return spec.weight * (flops[after] * MTBF_GPU_S / num_gpus - lost)


def best(num_gpus: int, current: dict[str, int], *, faulted: frozenset[str] = frozenset()) -> dict[str, int]:
    specs = [job(name) for name in current]
    choices = [x for x in product(*((0, *spec.sizes(num_gpus)) for spec in specs)) if sum(x) <= num_gpus]

    def total(choice: tuple[int, ...]) -> float:
        return sum(
            gain(spec, before=current[spec.job], after=x, faulted=spec.job in faulted, num_gpus=num_gpus)
            for spec, x in zip(specs, choice, strict=True)
        )

    return dict(zip(current, max(choices, key=total), strict=True))


def test_two_jobs_share_the_whole_cluster() -> None:
    assert best(8, {"gpt-a": 0, "gpt-b": 0}) == {"gpt-a": 4, "gpt-b": 4}
    assert best(8, {"gpt-a": 8, "gpt-b": 0}) == {"gpt-a": 4, "gpt-b": 4}


@pytest.mark.parametrize("faulted", [{"gpt-a"}, {"gpt-b"}, {"gpt-a", "gpt-b"}])
def test_whoever_loses_a_node_the_less_valuable_job_shrinks(faulted: set[str]) -> None:
    assert best(6, {"gpt-a": 4, "gpt-b": 4}, faulted=frozenset(faulted)) == {"gpt-a": 4, "gpt-b": 2}


def test_the_node_that_comes_back_goes_to_the_job_that_shrank() -> None:
    assert best(8, {"gpt-a": 4, "gpt-b": 2}) == {"gpt-a": 4, "gpt-b": 4}


def test_the_gpus_of_a_finished_job_go_to_the_other() -> None:
    assert best(8, {"gpt-a": 4}) == {"gpt-a": 8}


@pytest.mark.parametrize("name", ["gpt-a", "gpt-b"])
def test_throughput_rises_and_is_concave(name: str) -> None:
    table = {0: 0.0, **job(name).throughput_flops}
    sizes = sorted(table)
    slopes = [(table[y] - table[x]) / (y - x) for x, y in pairwise(sizes)]
    assert slopes[-1] > 0
    assert slopes == sorted(slopes, reverse=True)
