"""The words between agent and controller: frozen dataclasses, one JSON object each, in text frames of one websocket.

Wall clocks are epoch seconds of the sender.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Discriminator, TypeAdapter

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.inquiries import CheckNode, ReadLog
from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.memory_messages import FetchMemory, FindMemory, ForgetMemory, SaveCheckpoint
from unicron_lib.agent.rank_messages import NAN_STAYS_NAN, Progress, RankFailed, RankFinished
from unicron_lib.detection.gpu import GpuFaultKind
from unicron_lib.domain.events import Scalar
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.domain.skipping import Ranges

# --- agent -> controller ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process ended although nobody had asked it to. `exit_code` is negative for a signal.

    `error` is what it left in the file that TORCHELASTIC_ERROR_FILE names, empty if nothing.
    """

    job: str
    generation: int
    rank: int
    pid: int
    exit_code: int
    iteration: int
    out_of_memory: bool = False
    error: str = ""
    type: Literal["rank_exited"] = "rank_exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnreachable:
    """The controller's own observation: a node was silent for longer than `silent_s`."""

    silent_s: float
    reason: str
    jobs: tuple[str, ...] = ()
    type: Literal["node_unreachable"] = "node_unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStalled:
    """A rank has stayed in the same `section` for `silent_s`, longer than `limit_s`; usual is `usual_s` (0: not known).

    `section` is one of those of `Section`; a rank in `collective` waits for others. The job's recovery waits for another
    `wait_s`: it may go on by itself. For `still_s` its process has done nothing; 0: that is not known, or it works.
    """

    job: str
    generation: int
    rank: int
    iteration: int
    section: str
    silent_s: float
    limit_s: float
    usual_s: float
    wait_s: float
    still_s: float = 0.0
    type: Literal["rank_stalled"] = "rank_stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResumed:
    """A rank that had been told as stalled goes on."""

    job: str
    generation: int
    rank: int
    iteration: int
    silent_s: float
    type: Literal["rank_resumed"] = "rank_resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """Hardware of the node is broken, whatever ranks it may hold; `jobs` have ranks on the node.

    `gpu` is None if it is a link, or nobody can tell which GPU it is; `uuid` is empty if it was never told. `xid` is the
    driver's number for it, `count` how often it was seen. A `symptom` may follow from something else, elsewhere.
    Told once per GPU and kind in a life of the agent, and every 10 minutes again what the driver still shows.
    """

    kind: GpuFaultKind
    gpu: int | None
    uuid: str
    evidence: str
    jobs: tuple[str, ...] = ()
    xid: int | None = None
    count: int = 1
    symptom: bool = False
    type: Literal["gpu_fault"] = "gpu_fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNotice:
    """Something about the node that a person should know and that is no failure; with `active` False it is over."""

    code: str
    text: str
    active: bool = True
    type: Literal["node_notice"] = "node_notice"


OfNode = NodeUnreachable | GpuFault | NodeNotice | NodeLeaving
Body = RankExited | RankFailed | RankFinished | RankStalled | RankResumed | OfNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Something that must not get lost: kept by its sender until it is acknowledged.

    Numbered per life (`boot`) of an agent from 0; the controller's own observations of a node have `seq` -1.
    """

    node: str
    boot: str
    seq: int
    at: float
    body: Annotated[Body, Discriminator("type")]
    type: Literal["observation"] = "observation"

    @property
    def id(self) -> str:
        """The same for the same observation, however often it is told."""
        return f"{self.node}/{self.boot}/{self.seq}"

    @property
    def job(self) -> str | None:
        """The job that it is about, None for a node's."""
        return None if isinstance(self.body, OfNode) else self.body.job


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A rank that an agent runs now."""

    job: str
    generation: int
    rank: int
    pid: int
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """First frame of an agent: who it is, what it runs, and the port at which it takes and gives states (0: it does not)."""

    node: str
    boot: str
    address: str
    num_gpus: int
    rack: str = ""
    pool: str = ""
    gpu_model: str = ""
    ranks: tuple[RankInfo, ...] = ()
    memory_port: int = 0
    type: Literal["agent_hello"] = "agent_hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent every second; carries the newest progress of the node's ranks and what they are."""

    at: float
    progress: tuple[Progress, ...] = ()
    ranks: tuple[RankInfo, ...] = ()
    type: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to the command with the same `step`. `error` is one sentence; `stale` means a replaced generation."""

    step: str
    ok: bool
    result: dict[str, Scalar | list[dict[str, Scalar]]] = field(default_factory=dict)
    error: str = ""
    stale: bool = False
    type: Literal["reply"] = "reply"


# --- controller -> agent ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Observations up to and including `seq` are journalled: forget them."""

    seqs: tuple[int, ...]
    type: Literal["ack"] = "ack"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRendezvous:
    """Start the generation's TCPStore in a process of its own. Result: `address`, `port`.

    If the `spec` names a directory in Megatron-LM's layout, `checkpoint` tells from what its ranks will go on.
    """

    step: str
    job: str
    generation: int
    spec: JobSpec | None = None
    type: Literal["open_rendezvous"] = "open_rendezvous"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRanks:
    """Start ranks; `ranks` are pairs (rank, gpu). Ranks of this generation that already run are left alone.

    A parked rank of the job on one of these GPUs becomes the new rank there, and keeps its memory.

    `restore_from` is the manifest to start from, None for a fresh start; `skipped` batches are left out. Ranks without a state
    begin from a slot of the place `memory` (generation, iteration), if there is one here, or from those of another
    `memory_layout`. What they keep in memory is copied to the first of `memory_peers`, `HOST:PORT`, that takes it. `mtbf_s` is
    the job's mean time between failures, 0 where nobody needs it. Result: `pids` as a list of rank and pid.
    """

    step: str
    job: str
    generation: int
    spec: JobSpec
    layout: Layout
    ranks: tuple[tuple[int, int], ...]
    world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    store_url: str
    restore_from: str | None = None
    skipped: Ranges = ()
    memory: tuple[int, int] | None = None
    memory_layout: Layout | None = None
    memory_peers: tuple[str, ...] = ()
    mtbf_s: float = 0.0
    type: Literal["launch_ranks"] = "launch_ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRanks:
    """Ask the ranks of all generations below `below_generation` to stop at an iteration's end, within `deadline_s`.

    Result: `ranks`, a list of `{rank, generation, state: drained|parked|gone|busy, iteration, manifest}`.
    """

    step: str
    job: str
    below_generation: int
    deadline_s: float
    type: Literal["drain_ranks"] = "drain_ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRanks:
    """Have the ranks of all generations below `below_generation` park with their state in memory, within `deadline_s`.

    With `abort` at once, else together at an iteration's end. `condemned` ranks, which are known to hang, are killed, and so is
    who has not parked in time. A command that cannot park is not waited for, or drained if nothing has failed. Result: as of
    `DrainRanks`, with `gpu` and `micro_batches` of each rank.
    """

    step: str
    job: str
    below_generation: int
    deadline_s: float
    abort: bool = False
    condemned: tuple[int, ...] = ()
    type: Literal["hold_ranks"] = "hold_ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReplica:
    """Have one parked rank write its whole state. Result: `iteration`, `manifest`.

    Of a replica of several ranks each writes its part, for which `manifest` is "", and the first one, asked last, commits.
    If its generation has been replaced already, by a plan that was given up, it writes `as_generation`.
    """

    step: str
    job: str
    generation: int
    rank: int
    deadline_s: float
    as_generation: int | None = None
    type: Literal["save_replica"] = "save_replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRanks:
    """End whatever is left of the generations below `below_generation`: SIGTERM, after `grace_s` SIGKILL.

    Parked ranks on `keep_gpus` live on. From here on the agent refuses those generations. Result: `stopped`, the number of
    processes ended.
    """

    step: str
    job: str
    below_generation: int
    grace_s: float
    keep_gpus: tuple[int, ...] = ()
    type: Literal["stop_ranks"] = "stop_ranks"


OfMemory = FindMemory | FetchMemory | ForgetMemory
OfRanks = LaunchRanks | DrainRanks | HoldRanks | SaveCheckpoint | SaveReplica | StopRanks
Command = OpenRendezvous | OfRanks | OfMemory | InjectFault | CheckNode | ReadLog
FromAgent = AgentHello | Heartbeat | Observation | Progress | Reply
FromController = Ack | Command

from_agent: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Discriminator("type")], config=NAN_STAYS_NAN)
from_controller: TypeAdapter[FromController] = TypeAdapter(Annotated[FromController, Discriminator("type")])
command: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Discriminator("type")])
