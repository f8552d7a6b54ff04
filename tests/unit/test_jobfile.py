"""Job files and deployment YAMLs with mistakes: one sentence, before anything is started."""

from pathlib import Path

import pytest
import yaml

from unicron_lib.errors import UserError
from unicron_lib.jobfile import TRAIN, read_deployments, read_jobs


def entry(name: str = "a", **keys: object) -> dict[str, object]:
    return {"name": name, "entrypoint": TRAIN, "parameters": {"job": {"job": name}}, **keys}


def written(folder: Path, *entries: object, file: str = "job.yaml") -> Path:
    path = folder / file
    path.write_text(yaml.safe_dump({"deployments": list(entries)}))
    return path


def mistake(*paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_deployments(*paths)
    told = str(caught.value)
    assert told.startswith(str(paths[-1]))
    assert "\n" not in told
    return told


def test_a_file_of_jobs_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, entry("a", work_pool=None, pull=None), entry("b", work_pool={"name": "unicron"}, pull=[]))
    assert [spec.job for spec in read_jobs(path)] == ["a", "b"]
    assert [found["name"] for found in read_deployments(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": None}, "the key 'name' is missing"),
        ({"name": 7}, "name must be text, found 7"),
        ({"name": "a/b"}, "must not contain /"),
        ({"entrypoint": None}, "the key 'entrypoint' is missing"),
        ({"entrypoint": ["flows"]}, "entrypoint must be text"),
        ({"work_pool": "unicron"}, "work_pool must be a mapping such as {name: unicron}, found 'unicron'"),
        ({"work_pool": {"name": 3}}, "work_pool.name must be text, found 3"),
        ({"pull": "git"}, "pull must be a list"),
        ({"tags": "unicron"}, "tags must be a list"),
        ({"triggers": {}}, "triggers must be a list"),
        ({"parameters": []}, "parameters must be a mapping"),
        ({"parameters": None}, "has no `parameters: {job: ...}`"),
        ({"parameters": {"job": "a"}}, "has no `parameters: {job: ...}`"),
        ({"parameters": {"job": {}}}, "the key 'job' is missing under `job`"),
        ({"parameters": {"job": {"job": "a", "gpus": 3}}}, "unknown key 'gpus'"),
        ({"parameters": {"job": {"job": "a", "lr": "1e-3"}}}, "lr: '1e-3' is text"),
        ({"parameters": {"job": {"job": "a", "throughput_flops": {2: "1e9"}}}}, "throughput_flops: '1e9' is text"),
        ({"parameters": {"job": {"job": "a", "weight": float("nan")}}}, "weight must be a finite number"),
    ],
)
def test_a_mistake_in_an_entry_is_one_sentence(tmp_path: Path, wrong: dict[str, object], told: str) -> None:
    assert told in mistake(written(tmp_path, entry("good"), entry() | wrong))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x80\x81\xff", "is not a text file in UTF-8"),
        (b"a: b: c", "is not YAML"),
        (b"when: 2024-13-45", "is not YAML"),
        (b"\x00", "is not YAML"),
        (b"[" * 5000, "is not YAML"),
        (b"", "has no list `deployments`"),
        (b"- a", "has no list `deployments`"),
        (b"deployments: {}", "has no list `deployments`"),
        (b"deployments: []", "has no list `deployments`"),
        (b"deployments: [a]", "has no list `deployments`"),
    ],
)
def test_a_file_that_is_something_else_is_one_sentence(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert told in mistake(path)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    assert "No such file" in mistake(tmp_path / "none.yaml")
    assert "directory" in mistake(tmp_path)


def test_what_is_described_twice_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path, entry("a"))
    other = written(tmp_path, entry("b", parameters={"job": {"job": "a"}}), file="other.yaml")
    assert "the deployment 'a' is described twice" in mistake(written(tmp_path, entry("a"), entry("a"), file="twice.yaml"))
    assert f"the job 'a' is described also in {first}" in mistake(first, other)
    assert "the deployment 'a' is described twice" in mistake(first, first)


def test_a_job_has_the_train_flow(tmp_path: Path) -> None:
    path = written(tmp_path, {"name": "a", "entrypoint": "flows.recovery.recover"})
    assert read_deployments(path)
    with pytest.raises(UserError, match=r"a job's is flows\.training\.train"):
        read_jobs(path)
