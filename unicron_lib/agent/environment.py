"""The environment of a rank: torchrun's names, and our own with the prefix `UNICRON_`. Pure."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from unicron_lib.agent.beats import BEAT_FILE, beat_path
from unicron_lib.agent.left_lines import LINES_FILE, lines_path
from unicron_lib.agent.messages import LaunchRanks
from unicron_lib.agent.slot_places import MEMORY_DIR, MEMORY_KEEPS, MEMORY_LAYOUT, MEMORY_SLOT, keepers, slot_directory
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.skipping import Ranges

_spec: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)
_ranges: TypeAdapter[Ranges] = TypeAdapter(Ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What an agent knows about its own node; `interface` is the network device that ranks talk over, None for any.

    `has_gpus` tells whether `num_gpus` counts real devices, all of which there must be. `rack` names what shares a switch
    with it, "" if unknown. `pool` names the kind of instance that it is, "" if all nodes are alike, `gpu_model` is what the
    driver calls its GPUs, "" without any.
    """

    node: str
    address: str
    num_gpus: int
    run_dir: Path
    interface: str | None = None
    has_gpus: bool = False
    rack: str = ""
    pool: str = ""
    gpu_model: str = ""


def network_environment(facts: NodeFacts) -> dict[str, str]:
    """What makes gloo and NCCL use the node's interface."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if facts.interface else ()
    return {"UNICRON_NODE": facts.node} | {name: str(facts.interface) for name in names}


def rank_environment(
    facts: NodeFacts, command: LaunchRanks, rank: int, socket: Path, *, keeps_device: bool = False
) -> dict[str, str]:
    """The variables of `rank`, which `command` starts on the node `facts`.

    A process that has its device already `keeps_device`: which devices it sees cannot be changed any more.
    """
    gpus = dict(command.ranks)
    local = {number: index for index, number in enumerate(sorted(gpus))}
    values: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": command.world_size,
        "LOCAL_RANK": local[rank],
        "LOCAL_WORLD_SIZE": len(local),
        "GROUP_RANK": command.node_rank,
        "GROUP_WORLD_SIZE": command.num_nodes,
        "MASTER_ADDR": command.master_addr,
        "MASTER_PORT": command.master_port,
        "TORCHELASTIC_RUN_ID": command.job,
        "TORCHELASTIC_RESTART_COUNT": max(0, command.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": command.spec.max_restarts,
        "TORCHELASTIC_ERROR_FILE": error_file(facts, command.job, command.generation, rank),
        "UNICRON_JOB_ID": command.job,
        "UNICRON_GENERATION": command.generation,
        "UNICRON_RUN_DIR": facts.run_dir,
        "UNICRON_AGENT_SOCKET": socket,
        "UNICRON_LOG_FILE": log_file(facts, command.job, command.generation, f"r{rank}"),
        BEAT_FILE: beat_path(socket.parent, command.job, command.generation, rank),
        LINES_FILE: lines_path(socket.parent, command.job, command.generation, rank),
        "UNICRON_TP": command.layout.tp,
        "UNICRON_PP": command.layout.pp,
        "UNICRON_STORE_URL": command.store_url,
        "UNICRON_JOB_SPEC": _spec.dump_json(command.spec).decode(),
    }
    if command.restore_from is not None:
        values["UNICRON_RESTORE_FROM"] = command.restore_from
    if command.mtbf_s:
        values["UNICRON_MTBF_S"] = command.mtbf_s
    if command.skipped:
        values["UNICRON_SKIPPED_BATCHES"] = _ranges.dump_json(command.skipped).decode()
    if command.spec.memory_interval != 0:
        values[MEMORY_DIR] = slot_directory(facts.run_dir, facts.node) / command.job
        values |= {MEMORY_SLOT: "{}/{}".format(*command.memory)} if command.memory else {}
        values |= {MEMORY_LAYOUT: f"{kept_in.tp}/{kept_in.pp}"} if (kept_in := command.memory_layout) else {}
        keeps = rank in keepers(command.layout, gpus).values()
        values |= {MEMORY_KEEPS: 2 if command.memory_peers else 1} if keeps else {}
    if facts.has_gpus and not keeps_device:
        # In the order of the local ranks, so that LOCAL_RANK is the device's index, as under torchrun.
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts them: a GPU that is found broken is the one that is left
        values["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpus[number]) for number in sorted(gpus))
    return {name: str(value) for name, value in values.items()} | network_environment(facts)


def log_file(facts: NodeFacts, job: str, generation: int, who: str) -> Path:
    """Where the output of `who` (`r3`, `rendezvous`) of a generation goes."""
    return facts.run_dir / "logs" / job / f"g{generation}-{who}.log"


def error_file(facts: NodeFacts, job: str, generation: int, rank: int) -> Path:
    """Where a rank may write its last words, as under torchrun."""
    return facts.run_dir / "errors" / job / f"g{generation}-r{rank}.json"
