"""Agents whose nodes can be checked, four of them idle."""

from dataclasses import dataclass, field

from fake_site import FakeAgents

from tasks import checking as tasks
from unicron_lib.agent.inquiries import CheckNode
from unicron_lib.domain.events import NodeJoined

IDLE = ["node-3", "node-4", "node-5", "node-6"]


@dataclass
class CheckedAgents(FakeAgents):
    """Agents on some of which a check finds something; a meeting's members all see what one of them spoils."""

    faulty: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    groups: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def _result(self, node, command):
        if not isinstance(command, CheckNode):
            return super()._result(node, command)
        group = set(self.groups[command.generation])
        fault = {"device": "cuda:0", "test": "memory", "text": "2 words wrong"}
        return {
            "exchanged": not group & self.faulty,
            "gather_s": 0.9 if group & self.slow else 0.1,
            "compute_s": 0.1,
            "faults": [fault] if node in self.broken else [],
            "error": "RuntimeError: connection closed by peer" if group & self.faulty else "",
        }


def put_in_place(made, monkeypatch) -> CheckedAgents:
    """Let the services `made` reach such agents, of the nodes that there are and of the idle ones."""
    for module in ("tasks.checking", "flows.checking"):
        monkeypatch.setattr(f"{module}.services", lambda: made)
    for name in IDLE:
        made.journal.append(NodeJoined(id=f"j-{name}", at=1.0, node=name, boot="b", address="a", num_gpus=2))
    before = made.controller.agents
    agents = made.controller.agents = CheckedAgents(running=before.running, replies=before.replies)
    meet = tasks.meet.fn

    async def noted(group, turn, generation, deadline_s):
        agents.groups[generation] = group
        return await meet(group, turn, generation, deadline_s)

    monkeypatch.setattr(tasks.meet, "fn", noted)
    return agents
