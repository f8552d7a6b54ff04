"""What if: a scenario after nodes are lost or join, jobs end or begin; and what tells two answers apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unicron_lib.errors import UserError
from unicron_lib.planning import scenario, scenario_text
from unicron_lib.planning.scenario import Job, Scenario


def changed(
    asked: Scenario, *, lose: Sequence[str] = (), join: int = 0, finish: Sequence[str] = (), launch: Sequence[object] = ()
) -> Scenario:
    """The scenario after all that.

    `lose` holds names of the scenario's `nodes`, whose jobs are then faulted, or numbers of nodes that no job was on.
    Of `join` nodes the first bring back lost ones. `launch` holds job descriptions. Raises UserError with one sentence.
    """
    document = asked.model_dump(exclude_unset=True)
    document["cluster"], document["jobs"] = dict(document["cluster"]), [dict(job) for job in document["jobs"]]
    for what in lose:
        _lose(document, what)
    if join < 0:
        raise UserError(f"{join} nodes cannot join, use --lose for losses")
    returned = min(join, document.get("lost_nodes", 0))
    document["lost_nodes"] = document.get("lost_nodes", 0) - returned
    document["cluster"]["num_nodes"] += join - returned
    for job in finish:
        _finish(document, job)
    document["jobs"] += launch
    return scenario.parse(document)


def told(
    *, lose: Sequence[str] = (), join: int = 0, finish: Sequence[str] = (), launch: Sequence[Mapping[str, Any]] = ()
) -> str:
    """What was asked, in words; empty if nothing was."""
    parts = [f"{what} nodes are lost" if what.isdecimal() and what != "1" else f"{_node(what)} is lost" for what in lose]
    parts += [f"{join} nodes join" if join > 1 else "1 node joins"] if join else []
    parts += [f"{job} ends" for job in finish]
    parts += [f"{job['job']} begins" for job in launch]
    return f"What if {', '.join(parts)}: " if parts else ""


def _node(what: str) -> str:
    return "1 node" if what == "1" else what


def _lose(document: dict[str, Any], what: str) -> None:
    nodes = dict(document.get("nodes", {}))
    nameless = document["cluster"]["num_nodes"] - document.get("lost_nodes", 0) - len(nodes)
    if what in nodes:
        hit, number = nodes.pop(what), 1
    elif not what.isdecimal():
        known = f"its nodes are {', '.join(sorted(nodes))}" if nodes else "it names none under `nodes`, say how many are lost"
        raise UserError(f"the scenario has no node {what}: {known}")
    elif int(what) > nameless:
        advice = f"name those that are: {', '.join(sorted(nodes))}" if nodes else "lose fewer"
        raise UserError(f"{what} nodes without a name cannot be lost, there are {nameless}: {advice}")
    else:
        hit, number = (), int(what)
    document["lost_nodes"] = document.get("lost_nodes", 0) + number
    document["nodes"] = nodes
    for job in document["jobs"]:
        job["faulted"] = job.get("faulted", False) or job["job"] in hit


def _finish(document: dict[str, Any], name: str) -> None:
    jobs = [job["job"] for job in document["jobs"]]
    if name not in jobs:
        raise UserError(f"the scenario has no job {name}: its jobs are {', '.join(sorted(jobs)) or 'all finished'}")
    document["jobs"] = [job for job in document["jobs"] if job["job"] != name]
    document["nodes"] = {node: _without(on, name) for node, on in document.get("nodes", {}).items()}


def _without(on_it: Mapping[str, int] | Sequence[str], name: str) -> object:
    if isinstance(on_it, Mapping):
        return {job: gpus for job, gpus in on_it.items() if job != name}
    return [job for job in on_it if job != name]


def job_to_launch(path: Path) -> dict[str, Any]:
    """The job of a file: written as in a scenario, or the deployment YAML that `unicron submit` takes.

    Of a deployment the keys that a scenario knows count. Raises UserError with one sentence.
    """
    found = scenario_text.load(path)
    if not isinstance(found, Mapping):
        raise UserError(f"{path} holds no job: it must be a mapping with the keys of a job")
    if "deployments" not in found:
        return dict(found)
    try:
        (deployment,) = found["deployments"]
        job = dict(deployment["parameters"]["job"])
    except (TypeError, ValueError, KeyError):
        raise UserError(f"{path} must hold one deployment with parameters.job in it") from None
    return {key: value for key, value in job.items() if key in Job.model_fields}


def difference(other: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """What is else in `answer` than in `other`, both answers of `unicron plan`.

    Jobs map to their numbers of GPUs in both (None: not there), `moved_gpus` counts the GPUs that change hands, and
    `gain` is the difference in FLOP.
    """
    jobs = sorted({*other["gpus"], *answer["gpus"]})
    gpus = {job: [other["gpus"].get(job), answer["gpus"].get(job)] for job in jobs}
    apart = {job: pair for job, pair in gpus.items() if pair[0] != pair[1]}
    layouts = {job: [side["layout"].get(job) for side in (other, answer)] for job in jobs}
    return {
        "gpus": apart,
        "layout": {job: pair for job, pair in layouts.items() if pair[0] != pair[1]},
        "moved_gpus": sum(max(0, (after or 0) - (before or 0)) for before, after in apart.values()),
        "gain": answer["gain"] - other["gain"],
    }


def read_answer(path: Path) -> dict[str, Any]:
    """An answer that `unicron plan --json` has printed. Raises UserError with one sentence if the file is none."""
    found = scenario_text.load(path)
    if not isinstance(found, dict) or not isinstance(found.get("gpus"), dict) or not isinstance(found.get("layout"), dict):
        raise UserError(f"{path} is no plan: save one with `unicron plan FILE --json > {path.name}`")
    gpus, gain = found["gpus"], found.get("gain")
    numbers = [*gpus.values(), gain]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise UserError(f"{path} is no plan: gpus and gain must be numbers")
    if not all(isinstance(layout, dict) for layout in found["layout"].values()):
        raise UserError(f"{path} is no plan: its layout must be one mapping a job")
    return found
