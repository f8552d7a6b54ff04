"""One job on two nodes, over a directory and fake agents."""

from dataclasses import dataclass, replace

import pytest
from fake_site import FakeAgents, FakeController
from scenes import TABLE

from flows import response
from flows.response import plain, respond
from tasks.services import Services
from unicron_lib.adapters.files import FileStore
from unicron_lib.config import Settings
from unicron_lib.domain.events import FailureDetected, JobSubmitted, NodeJoined, StepCompleted
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.journal import Journal

TASKS = ("tasks.health", "tasks.planning", "tasks.transition", "tasks.memory", "tasks.sending")


@dataclass
class FakeSite:
    journal: Journal
    agents: FakeAgents
    tmp: object

    async def respond(self):
        await respond(plain)

    def fail(self, name, kind=ErrorKind.PROCESS_EXIT, **keys):
        job = self.journal.refresh().jobs["gpt-a"]
        found = {"job": "gpt-a", "generation": job.generation, "rank": 1, "iteration": 7, **keys}
        failure = Failure(id=name, kind=kind, method=DetectionMethod.PROCESS, seen_at=1.0, **found)
        self.journal.append(FailureDetected(id=name, at=1.0, failure=failure))

    def steps(self):
        return [e.event.id for e in self.journal.entries() if isinstance(e.event, StepCompleted)]


@pytest.fixture
async def site(tmp_path, monkeypatch):
    """Two nodes and one running job, over a directory and fake agents; decisions do not wait."""
    store = FileStore(tmp_path)
    settings = Settings(store_url=store.url, controller_url="http://nowhere", token="t", drain_s=0.1, command_s=0.1)
    agents = FakeAgents()
    made = Services(settings=settings, store=store, journal=Journal(store), controller=FakeController(agents))
    for module in (*TASKS, "flows.response", "flows.training"):
        monkeypatch.setattr(f"{module}.services", lambda: made)
    decide = response.decide

    def eager(state, now, policy):
        return decide(state, now, replace(policy, root_cause_grace_s=0.0, settle_s=0.0))

    monkeypatch.setattr(response, "decide", eager)
    monkeypatch.setattr(response, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr("tasks.events.emit_event", lambda **_: None)
    for number in (1, 2):
        made.journal.append(NodeJoined(id=f"j{number}", at=1.0, node=f"node-{number}", boot="b", address="a", num_gpus=2))
    spec = JobSpec(job="gpt-a", min_gpus=2, throughput_flops=TABLE)
    made.journal.append(JobSubmitted(id="s1", at=1.0, submission="1", spec=spec))
    fake = FakeSite(journal=made.journal, agents=agents, tmp=tmp_path)
    await fake.respond()
    assert made.journal.state.jobs["gpt-a"].gpus == 4
    return fake
