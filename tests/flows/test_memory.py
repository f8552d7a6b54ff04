"""A generation begins from what is in the memory of nodes, if nothing lives and the store is behind."""

from dataclasses import replace

import pytest
from fake_site import FakeAgents, FakeController, submit_anew

from tasks.memory import peers
from unicron_lib.agent.memory_messages import FetchMemory, FindMemory, ForgetMemory
from unicron_lib.agent.messages import LaunchRanks
from unicron_lib.controller.views import NodeView
from unicron_lib.domain.events import JobCancelled, JobSubmitted, NodeJoined
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Layout, StepKind


class Memory:
    """What nodes say of the slots in their memory, and what was asked of them."""

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[int, int] | tuple[int, int, str]]] = {}
        self.fetches = True
        self.asked: list[tuple[str, object]] = []

    def result(self, node: str, command: object) -> dict[str, object]:
        self.asked.append((node, command))
        if isinstance(command, FindMemory):
            keys = ("generation", "iteration", "part")
            slots = [{"num_bytes": 10, **dict(zip(keys, it, strict=False))} for it in self.held.get(node, [])]
            return {"slots": slots, "skipped": "" if slots else "the slot of iteration 9 is damaged"}
        return {"removed": 1}

    def of(self, kind: type) -> list[tuple[str, object]]:
        return [(node, command) for node, command in self.asked if isinstance(command, kind)]


@pytest.fixture
def memory(site, monkeypatch) -> Memory:
    """Nothing that was running lives; three nodes answer."""
    found, usual = Memory(), FakeAgents.carry_out

    def carry_out(self, node, command):
        if isinstance(command, LaunchRanks):
            found.asked.append((node, command))
        if isinstance(command, FetchMemory) and not found.fetches:
            self.refuse["fetch_memory"] = "its holders are gone"
        return usual(self, node, command)

    async def nodes(_):
        it = {"boot": "b", "num_gpus": 2, "connected": True, "verdict": "alive", "reason": "", "silent_s": 0.0}
        return tuple(NodeView(node=f"node-{n}", address="a", memory_port=n, **it) for n in (1, 2, 3))

    result = FakeAgents._result
    ours = FindMemory | FetchMemory | ForgetMemory
    monkeypatch.setattr(
        FakeAgents, "_result", lambda self, n, c: found.result(n, c) if isinstance(c, ours) else result(self, n, c)
    )
    monkeypatch.setattr(FakeAgents, "carry_out", carry_out)
    monkeypatch.setattr(FakeController, "nodes", nodes)
    site.agents.running.clear()
    return found


def told(site, kind: StepKind):
    plan = list(site.journal.refresh().plans.values())[-1]
    return next(plan.results[step.id] for step in plan.plan.steps if step.kind is kind)


async def test_the_furthest_slot_is_told_and_used(site, memory) -> None:
    memory.held = {"node-1": [(1, 40)], "node-2": [(1, 41)]}
    site.fail("f1")
    await site.respond()
    restored = told(site, StepKind.RESTORE)
    assert (restored["memory"], restored["iteration"], restored["fallback_iteration"]) == ("memory of node-2", 41, -1)
    assert restored["skipped"] == "node-3: the slot of iteration 9 is damaged"
    assert {(command.memory, command.memory_layout) for _, command in memory.of(LaunchRanks)} == {((1, 41), None)}
    assert memory.of(FetchMemory) == []
    assert told(site, StepKind.LAUNCH)["from"] == "memory of node-2"


async def test_what_only_another_node_has_is_copied_first(site, memory) -> None:
    memory.held = {"node-3": [(1, 41)]}
    site.fail("f1")
    await site.respond()
    ((node, command),) = memory.of(FetchMemory)
    assert (node, command.holders, command.slot_generation, command.iteration) == ("node-1", ("a:3",), 1, 41)
    assert told(site, StepKind.RESTORE)["memory"] == "memory of node-3, copied to node-1"


async def test_a_copy_that_fails_leaves_the_store(site, memory) -> None:
    memory.held, memory.fetches = {"node-3": [(1, 41)]}, False
    site.fail("f1")
    await site.respond()
    restored = told(site, StepKind.RESTORE)
    assert "memory" not in restored
    assert "iteration 41 could not be copied from its holders" in restored["skipped"]
    assert {command.memory for _, command in memory.of(LaunchRanks)} == {None}


async def test_parts_of_another_layout_come_to_who_needs_them(site, memory, monkeypatch) -> None:
    """A replica of two stages, each of two lines, has lost a node, whose parts the third one has copies of."""
    cut, whole = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    tables = ({**cut, "throughput_flops": {4: 9.0e8}}, {**whole, "throughput_flops": {2: 4.0e8}})
    spec = JobSpec(job="gpt-a", min_gpus=2, parallel_layouts=tuple(ParallelLayout(**it) for it in tables))
    await submit_anew(site, spec, monkeypatch)
    before = site.journal.refresh().jobs["gpt-a"].assignment
    assert before.layout == Layout(tp=2, pp=2)
    parts = [(before.generation, 41, part) for part in before.layout.parts]
    memory.held = {"node-1": parts[:2], "node-3": parts[2:]}
    memory.asked.clear()
    site.fail("f", ErrorKind.NODE_LOST, job=None, generation=None, rank=None, node="node-2", boot="b")
    await site.respond()
    assert site.journal.refresh().jobs["gpt-a"].assignment.layout == Layout(pp=2)
    assert [(node, it.part, it.holders) for node, it in memory.of(FetchMemory)] == [
        ("node-1", part, ("a:3",)) for part in before.layout.parts[2:]
    ]
    where = "memory of node-1; memory of node-3, copied to node-1, resharded from tp=2 pp=2"
    assert (told(site, StepKind.RESTORE)["memory"], told(site, StepKind.LAUNCH)["from"]) == (where, where)
    ((_, launched),) = memory.of(LaunchRanks)
    assert (launched.memory, launched.memory_layout) == ((before.generation, 41), Layout(tp=2, pp=2))


async def test_ranks_that_live_need_no_slot(site, memory) -> None:
    site.agents.running.update({("node-1", "gpt-a"): 1, ("node-2", "gpt-a"): 1})
    memory.held = {"node-1": [(1, 40)]}
    site.fail("f1")
    await site.respond()
    assert memory.of(FindMemory) == []


async def test_a_job_of_one_node_has_peers_and_one_of_two_has_none(site, memory) -> None:
    site.journal.append(NodeJoined(id="j3", at=1.0, node="node-3", boot="b", address="a", num_gpus=2))
    state = site.journal.refresh()
    whole = state.jobs["gpt-a"].assignment
    half = replace(whole, slots=tuple(slot for slot in whole.slots if slot.node == "node-1"))
    assert await peers(state, whole) == {}
    assert {home: set(them) for home, them in (await peers(state, half)).items()} == {"node-1": {"a:2", "a:3"}}


async def test_an_ended_job_is_forgotten_everywhere(site, memory) -> None:
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    await site.respond()
    assert {node for node, _ in memory.of(ForgetMemory)} == {"node-1", "node-2", "node-3"}


async def test_what_a_killed_agent_has_left_under_the_name_is_forgotten_before_a_submissions_first_ranks(site, memory) -> None:
    spec = site.journal.refresh().jobs["gpt-a"].spec
    site.journal.append(JobCancelled(id="c", at=1.0, job="gpt-a", submission="1"))
    await site.respond()
    memory.asked.clear()
    site.journal.append(JobSubmitted(id="s2", at=2.0, submission="2", spec=spec))
    await site.respond()
    kinds = [type(command) for _, command in memory.asked]
    forgotten = memory.of(ForgetMemory)
    assert {(node, command.job, command.below_generation > 10**9) for node, command in forgotten} == {
        (f"node-{number}", "gpt-a", True) for number in (1, 2, 3)
    }
    assert max(at for at, kind in enumerate(kinds) if kind is ForgetMemory) < kinds.index(LaunchRanks)
    site.agents.running.clear()
    memory.asked.clear()
    site.fail("f1")
    await site.respond()
    assert memory.of(FindMemory), "it restored from memory if it could"
    assert memory.of(ForgetMemory) == [], "what it has kept itself stays"


async def test_a_slot_of_a_generation_that_has_not_been_is_a_strangers(site, memory) -> None:
    memory.held = {"node-1": [(1, 40)], "node-3": [(7, 603)]}
    site.fail("f1")
    await site.respond()
    assert (told(site, StepKind.RESTORE)["memory"], told(site, StepKind.RESTORE)["iteration"]) == ("memory of node-1", 40)
