"""A running local cluster as tests see it, and hands to hurt it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from unicron_lib.agent.access import read_token
from unicron_lib.controller.client import ControllerClient
from unicron_lib.domain.cluster import ClusterState, IncidentStatus
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.errors import ControllerError
from unicron_lib.journal import Journal
from unicron_lib.local.processes import marked
from unicron_lib.local.site import Site

PATIENCE_S = 150.0
PARTS = {
    "recovery": "flows.service",
    "controller": "unicron_lib.controller",
    "prefect-server": "prefect.server.api.server:create_app",
    "worker": "worker",
}
UNICRON = Path(sys.executable).with_name("unicron")


@dataclass
class Cluster:
    home: Path
    site: Site
    journal: Journal

    def cli(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "UNICRON_HOME": str(self.home)}
        done = subprocess.run([UNICRON, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, f"unicron {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    @contextmanager
    def beside(self, *arguments: str):
        """A command that runs beside the block: a recovery may be over before one returns."""
        env = {**os.environ, "UNICRON_HOME": str(self.home)}
        with subprocess.Popen([UNICRON, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
            yield
            told, _ = running.communicate(timeout=300)
        assert running.returncode == 0, told.decode()

    def json(self, *arguments: str):
        return json.loads(self.cli(*arguments, "--json").stdout)

    def pid(self, part: str) -> int:
        for process in marked(self.site.cluster_id):
            line = process.cmdline()
            if PARTS[part] in line and process.ppid() == self.site.supervisor_pid:
                return process.pid
        raise AssertionError(f"{part} is not running")

    def kill(self, part: str, *, pid: int | None = None) -> None:
        """Kill it; to find its process takes a moment, unless that is known."""
        pid = pid or self.pid(part)
        os.kill(pid, signal.SIGKILL)
        self.until(f"a new {part}", lambda _: self._lives_anew(part, pid))

    def _lives_anew(self, part: str, old: int) -> bool:
        try:
            return self.pid(part) != old
        except (AssertionError, psutil.Error):
            return False

    @property
    def state(self) -> ClusterState:
        return self.journal.refresh()

    def until(self, what: str, holds) -> ClusterState:
        self.wait(what, lambda: holds(self.state))
        return self.journal.state

    def wait(self, what: str, holds, *, patience_s: float = PATIENCE_S, pause_s: float = 0.05) -> None:
        deadline = time.monotonic() + patience_s
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.story()}"
            time.sleep(pause_s)  # a poll of a real, remote condition

    def ask(self, question):
        """The controller's answer to `question(client)`."""

        async def ask():
            async with ControllerClient(self.site.controller_url, read_token(self.site.token_file)) as client:
                return await question(client)

        return asyncio.run(ask())

    def calm(self, sizes: dict[str, int]) -> ClusterState:
        """Wait until nothing is open and the jobs have these sizes."""

        def holds(state: ClusterState) -> bool:
            found = {name: job.gpus for name, job in state.jobs.items() if job.status is JobStatus.RUNNING}
            return state.active_plan is None and not state.open_incidents and found == sizes

        return self.until(f"calm with {sizes}", holds)

    def iterations(self) -> dict[str, int]:
        """How many each running job has done; asked for without a command, which takes a second to start."""
        live: dict[str, int] = {}
        with suppress(ControllerError):
            live = {it.job: it.iteration + 1 for it in self.ask(lambda client: client.progress())}
        running = {name: job for name, job in self.state.jobs.items() if job.status is JobStatus.RUNNING}
        return {name: live.get(name, job.failed_at or 0) for name, job in running.items()}

    def bring_back(self) -> None:
        """Lost nodes, as `unicron up` does, and wait for them."""
        os.kill(self.site.supervisor_pid, signal.SIGHUP)
        num_gpus = self.site.num_nodes * self.site.gpus_per_node
        self.until("all nodes", lambda state: state.num_healthy_gpus == num_gpus)

    def trains_on(self) -> None:
        """Every running job makes new iterations."""
        before = self.iterations()
        self.until("new iterations", lambda _: all(now > before[job] for job, now in self.iterations().items()))

    def check_journal(self) -> None:
        """No event twice; one completed plan an incident, or a note on why none was needed: busy machines do stall."""
        entries = self.journal.entries()
        doubles = [name for name, count in Counter(entry.event.id for entry in entries).items() if count > 1]
        assert not doubles
        assert [entry.seq for entry in entries] == list(range(len(entries)))
        state = self.state
        for incident in state.incidents.values():
            if incident.status is IncidentStatus.CLOSED:
                done = [p for p in state.plans.values() if p.finished_at is not None and incident.id in p.plan.incidents]
                assert len(done) == 1 or (not done and incident.plan is None and incident.note), incident

    def new_failures(self, known) -> list:
        return [it for name, it in self.state.incidents.items() if name not in known and it.is_failure]

    def story(self) -> str:
        state = self.journal.state
        jobs = {name: (job.status, job.gpus, job.generation) for name, job in state.jobs.items()}
        return f"jobs {jobs}; open {state.open_incidents}; plan {state.active_plan}; logs in {self.site.logs}"


def job_file(folder: Path, name: str, **keys: object) -> Path:
    spec = {
        "job": name,
        "min_gpus": 2,
        "train_iters": 1_000_000,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "pace_s": 0.1,
        "save_interval": 50,
        "max_restarts": 1000,  # tests do more harm to a job than its budget allows
        **keys,
    }
    entry = {"name": name, "entrypoint": "flows.training.train", "parameters": {"job": spec}, "pull": []}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"name": name, "deployments": [{**entry, "work_pool": {"name": "unicron"}}]}))
    return path
