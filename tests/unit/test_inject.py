"""`unicron inject`: what it aims at, what it refuses, what it journals, and what it does to a store."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from unicron_lib.adapters.files import FileStore
from unicron_lib.agent.fault_messages import Fault, InjectFault
from unicron_lib.agent.injection import Injection, xid_line
from unicron_lib.agent.messages import Reply
from unicron_lib.agent.ranks import Rank, Ranks
from unicron_lib.cli import app
from unicron_lib.cli.faults import KINDS, STORE_DOWN, Harm, aim, amount_of, text_of
from unicron_lib.detection.exceptions import kind_of_exception
from unicron_lib.detection.kernel_log import XidLine, parse
from unicron_lib.domain.cluster import ClusterState, Node
from unicron_lib.domain.events import FaultInjected, NodeJoined
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus
from unicron_lib.domain.plans import Assignment, Layout, Slot
from unicron_lib.errors import AgentError, CommandTimeout, ControllerError, NodeNotConnected, UserError
from unicron_lib.journal import Journal
from unicron_lib.local import outage

SLOTS = (Slot(node="n0", gpu=0), Slot(node="n0", gpu=1), Slot(node="n1", gpu=0))
STATE = ClusterState(
    nodes={name: Node(id=name, boot="b", address="", num_gpus=2, since=0.0) for name in ("n0", "n1")},
    jobs={
        "a": JobState(
            spec=JobSpec(job="a"),
            status=JobStatus.RUNNING,
            generation=1,
            assignment=Assignment(job="a", generation=1, layout=Layout(dp=3), slots=SLOTS),
        ),
        "queued": JobState(spec=JobSpec(job="queued")),
    },
)
RIGHT = {"JOB/RANK": "a/2", "NODE/GPU": "n1/1", "NODE": "n1", "no target": ""}


def test_every_fault_that_an_agent_knows_can_be_asked_for() -> None:
    assert set(KINDS) == {kind for part in get_args(Fault) for kind in get_args(part) or (part,)} | {STORE_DOWN}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_finds_its_target(kind: str) -> None:
    """What the journal calls the target is what failures of it are about: the job's rank, or the node."""
    harm = aim(STATE, kind, RIGHT[KINDS[kind].target])
    assert harm.amount == KINDS[kind].amount
    where = {"JOB/RANK": ("n1", "a/2"), "NODE/GPU": ("n1", "n1"), "NODE": ("n1", "n1"), "no target": ("", "store")}
    assert (harm.node, harm.victim) == where[KINDS[kind].target]


def test_a_gpu_and_an_amount_arrive() -> None:
    assert aim(STATE, "xid", "n0/1", 48) == Harm(kind="xid", victim="n0", node="n0", gpu=1, amount=48)
    assert aim(STATE, "slow", "a/0", 1.5) == Harm(kind="slow", victim="a/0", node="n0", job="a", amount=1.5)


def test_a_spike_takes_whole_iterations() -> None:
    assert aim(STATE, "spike", "a/1", 5).amount == 5
    with pytest.raises(UserError, match="spike takes a whole number of iterations from 1 to 1000"):
        amount_of("spike", 2.5)


@pytest.mark.parametrize(
    ("kind", "target", "amount", "told"),
    [
        ("earthquake", "a/0", None, "unknown fault 'earthquake': choose one of crash, oom, exit"),
        ("crash", "a/3", None, "a has ranks 0 to 2"),
        ("crash", "a", None, "a has ranks 0 to 2"),
        ("crash", "a/-1", None, "a has ranks 0 to 2"),
        ("crash", "a/\u0663", None, "a has ranks 0 to 2"),
        ("crash", "nobody/0", None, "no running job 'nobody'"),
        ("crash", "queued/0", None, "no running job 'queued'"),
        ("crash", "a/0", 3.0, "crash takes no --amount"),
        ("xid", "n1/2", None, "n1 has 2 GPUs"),
        ("ecc", "n9/0", None, "no node 'n9': there are n0, n1"),
        ("node-loss", "a/0", None, "no node 'a/0'"),
        ("node-loss", "", None, "no node ''"),
        ("xid", "n1/0", 7.5, "--amount 7.5: xid takes a whole Xid number from 1 to 65535"),
        ("xid", "n1/0", 70000, "xid takes a whole Xid number from 1 to 65535"),
        ("exit", "a/0", 256, "--amount 256: exit takes a whole code from 1 to 255"),
        ("exit", "a/0", 16.5, "exit takes a whole code"),
        ("exit", "a/0", 0, "--amount 0: give exit a code of 1 or more"),
        ("xid", "n1/0", 0, "--amount 0"),
        ("slow", "a/0", 0.5, "--amount 0.5: give slow a factor of 1 or more"),
        ("partition", "n0", float("nan"), "--amount nan"),
        ("partition", "n0", float("inf"), "--amount inf"),
        ("store-down", "n0", None, "store-down takes no target"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str, target: str, amount: float | None, told: str) -> None:
    with pytest.raises(UserError) as refused:
        aim(STATE, kind, target, amount)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@given(kind=st.sampled_from(sorted(KINDS)), target=st.text(max_size=12), amount=st.none() | st.floats())
def test_nothing_but_a_sentence_comes_of_nonsense(kind: str, target: str, amount: float | None) -> None:
    try:
        harm = aim(STATE, kind, target, amount)
    except UserError:
        return
    assert harm.kind == kind
    assert harm.amount == amount_of(kind, amount)


# --- the command -----------------------------------------------------------------------------------------------------


class FakeCluster:
    """A target of the command: a journal in a directory, an agent that answers as it is told to."""

    def __init__(self, directory: Path, answer: Callable[[InjectFault], Reply]) -> None:
        directory.mkdir()
        self.store_url = directory.as_uri()
        self.env: dict[str, str] = {}
        self.directory = directory
        self.sent: list[tuple[str, InjectFault]] = []
        self.journalled_before: list[str] = []
        self._answer = answer

    def journal(self) -> Journal:
        return Journal(FileStore(self.directory))

    def faults(self) -> list[FaultInjected]:
        return [entry.event for entry in self.journal().entries() if isinstance(entry.event, FaultInjected)]

    @asynccontextmanager
    async def client(self):
        yield self

    async def command(self, node: str, command: InjectFault, *, timeout_s: float) -> Reply:
        self.journalled_before += [fault.kind for fault in self.faults()]
        self.sent.append((node, command))
        return self._answer(command)


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[InjectFault], Reply]) -> FakeCluster:
    cluster = FakeCluster(tmp_path / "store", answer)
    cluster.journal().append(NodeJoined(id="joined", at=1.0, node="n0", boot="b", address="", num_gpus=2))
    monkeypatch.setattr(importlib.import_module("unicron_lib.cli.inject"), "find_target", lambda: cluster)
    return cluster


def done(command: InjectFault) -> Reply:
    return Reply(step=command.step, ok=True)


def refuse(command: InjectFault) -> Reply:
    return Reply(step=command.step, ok=False, error="no such thing here")


def fall_silent(_: InjectFault) -> Reply:
    raise CommandTimeout("no answer")


def break_off(_: InjectFault) -> Reply:
    raise ControllerError("the connection broke")


def be_gone(_: InjectFault) -> Reply:
    raise NodeNotConnected("node n0 is not connected")


def test_a_fault_is_journalled_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = fake(tmp_path, monkeypatch, done)
    result = CliRunner().invoke(app, ["inject", "xid", "n0/1", "--amount", "48", "--json"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["fault"], told["target"], told["node"], told["amount"]) == ("xid", "n0/1", "n0", 48)
    ((node, command),) = cluster.sent
    assert (node, command.fault, command.gpu, command.amount) == ("n0", "xid", 1, 48)
    assert cluster.journalled_before == ["xid"]
    (fault,) = cluster.faults()
    assert (fault.kind, fault.target, fault.at) == ("xid", "n0", told["at"])


@pytest.mark.parametrize("kind", ["node-loss", "partition"])
def test_who_is_cut_off_need_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fake(tmp_path, monkeypatch, break_off)
    assert CliRunner().invoke(app, ["inject", kind, "n0"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "answer", "error"),
    [
        (["ecc", "n0/0"], refuse, AgentError),
        (["ecc", "n0/0"], break_off, ControllerError),
        (["node-loss", "n0"], fall_silent, CommandTimeout),
        (["node-loss", "n0"], be_gone, NodeNotConnected),
    ],
)
def test_what_was_not_done_is_not_called_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], answer: Callable[[InjectFault], Reply], error: type
) -> None:
    fake(tmp_path, monkeypatch, answer)
    result = CliRunner().invoke(app, ["inject", *arguments])
    assert isinstance(result.exception, error)


def test_a_wrong_word_needs_no_cluster() -> None:
    result = CliRunner().invoke(app, ["inject", "earthquake", "a/0"])
    assert isinstance(result.exception, UserError)
    assert "unknown fault" in str(result.exception)


# --- the store -------------------------------------------------------------------------------------------------------


def test_a_directory_is_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = fake(tmp_path, monkeypatch, done)
    during: list[bool] = []
    monkeypatch.setattr(outage.time, "sleep", lambda _: during.append(cluster.directory.exists()))
    assert CliRunner().invoke(app, ["inject", "store-down", "--amount", "0.5"]).exit_code == 0
    assert during == [False]
    assert [fault.target for fault in cluster.faults()] == ["store"]


def test_a_directory_comes_back_whatever_ends_the_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    (store / "journal").mkdir(parents=True)

    def be_terminated(_: float) -> None:
        assert not store.exists()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(outage.time, "sleep", be_terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        outage.take_away(store.as_uri(), {}, seconds=1.0)
    assert (store / "journal").is_dir()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_store_that_was_begun_anew_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    (store / "journal").mkdir(parents=True)
    monkeypatch.setattr(outage.time, "sleep", lambda _: (store / "new").mkdir(parents=True))
    with pytest.raises(UserError, match=r"is still in .*\.store\.away"):
        outage.take_away(store.as_uri(), {}, seconds=1.0)
    assert (store / "new").is_dir()
    assert (tmp_path / ".store.away" / "journal").is_dir()


def test_a_store_that_is_not_there_cannot_be_taken_away(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be moved away"):
        outage.take_away((tmp_path / "none").as_uri(), {}, seconds=1.0)


def test_a_local_s3_server_is_stopped_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()", "moto.server", "49999"], stdin=subprocess.PIPE)
    seen: list[bool] = []
    monkeypatch.setattr(outage.time, "sleep", lambda _: seen.append(becomes(server.pid, stopped=True)))
    try:
        outage.take_away("s3://bucket/prefix", {"AWS_ENDPOINT_URL": "http://127.0.0.1:49999"}, seconds=1.0)
        assert seen == [True]
        assert becomes(server.pid, stopped=False)
    finally:
        server.communicate(b"\n")


def becomes(pid: int, *, stopped: bool) -> bool:
    """A signal takes its time to arrive."""
    deadline = time.monotonic() + 20.0
    while (psutil.Process(pid).status() == psutil.STATUS_STOPPED) is not stopped:
        if time.monotonic() > deadline:
            return False
    return True


@pytest.mark.parametrize(
    "endpoint", [{}, {"AWS_ENDPOINT_URL": "https://s3.example.com"}, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}]
)
def test_the_store_of_others_is_left_alone(endpoint: dict[str, str]) -> None:
    with pytest.raises(UserError, match="is not the store of a local cluster"):
        outage.take_away("s3://bucket/prefix", endpoint, seconds=1.0)


# --- the agent's end -------------------------------------------------------------------------------------------------


class Gpus:
    def __init__(self) -> None:
        self.injected: list[tuple[str, int]] = []

    def inject(self, kind: str, gpu: int) -> None:
        self.injected.append((kind, gpu))

    def hang(self, seconds: float) -> None:
        self.injected.append(("hang", seconds))


class Kernel:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def address_of(self, gpu: int) -> str:
        return f"0000:0{gpu + 1}:00"

    def inject(self, line: str) -> None:
        self.heard.append(line)


def agent() -> tuple[Injection, Gpus, Kernel]:
    gpus, kernel = Gpus(), Kernel()
    return Injection(node="n0", num_gpus=2, ranks=Ranks(), gpus=gpus, kernel=kernel, notices=None), gpus, kernel


def test_faults_of_gpus_go_to_what_looks_at_them() -> None:
    injection, gpus, kernel = agent()
    for fault in ("ecc", "nvlink", "row-remap", "gpu-lost"):
        injection.carry_out(InjectFault(step=fault, fault=fault, gpu=1))
    injection.carry_out(InjectFault(step="xid", fault="xid", gpu=0, amount=48))
    assert gpus.injected == [("ecc", 1), ("nvlink", 1), ("row-remap", 1), ("gpu-lost", 1)]
    assert kernel.heard == [xid_line("0000:01:00", 48)]
    said = parse(kernel.heard[0])
    assert isinstance(said, XidLine)
    assert said.code == 48


def test_a_probe_that_hangs_needs_no_gpu() -> None:
    injection, gpus, _ = agent()
    injection.carry_out(InjectFault(step="x", fault="probe-hang", amount=45.0))
    assert gpus.injected == [("hang", 45.0)]


@pytest.mark.parametrize("fault", ["ecc", "xid", "crash", "slow"])
def test_what_is_not_here_is_refused(fault: Fault) -> None:
    injection, gpus, kernel = agent()
    with pytest.raises(AgentError, match=r"n0"):
        injection.carry_out(InjectFault(step="x", fault=fault, job="a", rank=0, gpu=2, amount=1.0))
    assert not gpus.injected
    assert not kernel.heard


EXCEPTIONS = {
    "AcceleratorError: CUDA error: uncorrectable ECC error encountered": ErrorKind.ECC_ERROR,
    "AcceleratorError: CUDA error: an illegal memory access was encountered": ErrorKind.ILLEGAL_MEMORY_ACCESS,
    "AcceleratorError: CUDA error: unspecified launch failure": ErrorKind.CUDA_ERROR,
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": ErrorKind.OUT_OF_MEMORY,
    "DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to a network error": ErrorKind.NCCL_REMOTE_ERROR,
    "ConnectionRefusedError: [Errno 111] Connection refused": ErrorKind.CONNECTION_REFUSED,
    "ConnectionResetError: [Errno 104] Connection reset by peer": ErrorKind.CONNECTION_RESET,
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ": ErrorKind.DATALOADER_ERROR,
    "KeyError: 'input_ids'": ErrorKind.USER_ERROR,
}


@pytest.mark.parametrize(("text", "kind"), EXCEPTIONS.items())
def test_what_is_raised_can_be_any_kind_of_failure(text: str, kind: ErrorKind) -> None:
    name, _, message = text_of("exception", text).partition(": ")
    assert kind_of_exception(name, message) is kind


@pytest.mark.parametrize(
    ("kind", "text", "told"), [("crash", "KeyError: x", "takes no"), ("exception", "no such type", "give")]
)
def test_a_text_that_makes_no_sense_is_refused(kind: str, text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        text_of(kind, text)


def test_a_spot_notice_goes_to_what_looks_for_them() -> None:
    seen = []
    notices = SimpleNamespace(inject=seen.append)
    injection = Injection(node="n0", num_gpus=0, ranks=Ranks(), gpus=None, kernel=None, notices=notices)
    assert injection.carry_out(InjectFault(step="s", fault="spot-notice", amount=120.0)) == {}
    assert seen == [120.0]


def test_the_text_reaches_the_rank() -> None:
    ranks, orders = Ranks(), []
    ranks.add(Rank(job="a", generation=1, rank=2, gpu=0, process=None, orders=orders))
    injection = Injection(node="n0", num_gpus=2, ranks=ranks, gpus=None, kernel=None, notices=None)
    injection.carry_out(InjectFault(step="s", fault="exception", job="a", rank=2, text="KeyError: 'x'"))
    assert [(order.order, order.text) for order in orders] == [("raise", "KeyError: 'x'")]
