"""A cluster without processes: agents that answer commands, and a controller client that reaches them."""

import asyncio
from dataclasses import dataclass, field

from unicron_lib.agent.messages import DrainRanks, HoldRanks, LaunchRanks, OpenRendezvous, Reply, SaveReplica, StopRanks
from unicron_lib.controller.origins import Origin
from unicron_lib.controller.views import JobProgress
from unicron_lib.domain.events import JobCancelled, JobSubmitted
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import NodeNotConnected


@dataclass
class FakeAgents:
    """Keeps what each node runs: generations by (node, job); every effect is counted by its step.

    One rank a node speaks for all. `held` are those that live on, by (node, job), as their generation and who adopts them.
    """

    running: dict[tuple[str, str], int] = field(default_factory=dict)
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    adopted: list[tuple[str, str, int]] = field(default_factory=list)
    effects: list[tuple[str, str]] = field(default_factory=list)
    replies: dict[str, Reply] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    refuse: dict[str, str] = field(default_factory=dict)
    refuse_on: dict[str, str] = field(default_factory=dict)

    def carry_out(self, node: str, command) -> Reply:
        if command.step in self.replies:
            return self.replies[command.step]
        if error := self.refuse.get(command.type) or self.refuse_on.get(node):
            return Reply(step=command.step, ok=False, error=error)
        self.effects.append((command.type, command.step))
        reply = Reply(step=command.step, ok=True, result=self._result(node, command))
        self.replies[command.step] = reply
        return reply

    def _result(self, node, command):
        match command:
            case OpenRendezvous():
                return {"address": "127.0.0.1", "port": 1}
            case LaunchRanks():
                self.running[node, command.job] = command.generation
                if self.held.pop((node, command.job), 0) == command.generation:
                    self.adopted.append((node, command.job, command.generation))
                return {"pids": []}
            case HoldRanks() | DrainRanks():
                return {"ranks": self._parked(node, command)}
            case SaveReplica():
                return {"iteration": 7, "manifest": None}
            case StopRanks():
                return {"stopped": self._stopped(node, command)}

    def _parked(self, node, command):
        generation = self.running.get((node, command.job))
        if generation is None:
            return []
        rank = {"rank": 0, "generation": generation, "state": "parked", "iteration": 7, "manifest": None}
        if isinstance(command, DrainRanks):
            return [rank]
        self.held[node, command.job] = command.below_generation
        return [{**rank, "gpu": 0, "micro_batches": 3}]

    def _stopped(self, node, command):
        if command.keep_gpus and self.held.get((node, command.job)) == command.below_generation:
            return 0
        self.held.pop((node, command.job), None)
        return int(self.running.pop((node, command.job), None) is not None)


@dataclass
class FakeController:
    """The part of ControllerClient that transitions use."""

    agents: FakeAgents

    async def command(self, node, wanted, *, timeout_s):
        if node in self.agents.gone:
            raise NodeNotConnected(f"node {node} is not connected")
        return self.agents.carry_out(node, wanted)

    async def nodes(self):
        return ()

    async def progress(self):
        return ()

    async def acknowledge(self, ids):
        return len(list(ids))

    async def acknowledged(self, told=-1, *, wait_s=0.0):
        await asyncio.sleep(wait_s)
        return told

    async def job_progress(self, job, *, generation, world_size, wait_s):
        nodes = [node for (node, name), running in self.agents.running.items() if name == job and running == generation]
        if not nodes:
            return None
        return JobProgress(
            job=job,
            generation=generation,
            world_size=world_size,
            iteration=8,
            loss=1.0,
            iteration_s=0.1,
            flops=1.0,
            at=1.0,
            first_iteration_at=1.0,
            iterations=dict.fromkeys(range(world_size), 8),
            measured_flops={},
            origins={
                rank: Origin(source="own memory" if self.agents.adopted else "", kept_micro_batches=3)
                for rank in range(world_size)
            },
        )


async def submit_anew(site, spec: JobSpec, monkeypatch) -> None:
    """The site's job ends, and begins anew as `spec` has it; from here on each of its ranks parks when it is asked to."""
    site.journal.append(JobCancelled(id="c", at=1.0, job=spec.job, submission="1"))
    site.journal.append(JobSubmitted(id="s2", at=1.0, submission="2", spec=spec))
    await site.respond()
    site.agents.effects.clear()

    def parked(self, node, command):
        assignment = site.journal.state.jobs[spec.job].assignment
        told = {"generation": self.running[node, command.job], "state": "parked", "iteration": 7, "manifest": None}
        return [{**told, "rank": rank, "gpu": gpu, "micro_batches": 0} for rank, gpu in assignment.ranks_on(node)]

    monkeypatch.setattr(FakeAgents, "_parked", parked)
