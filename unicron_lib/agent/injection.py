"""Harm on purpose: to the ranks of this node, and to what its probes see."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Literal, Protocol, assert_never

from unicron_lib.agent.fault_messages import GpuInjection, InjectFault, RankFault
from unicron_lib.agent.rank_messages import RankOrder
from unicron_lib.agent.ranks import Rank, Ranks
from unicron_lib.detection.link import LinkRules
from unicron_lib.domain.events import Scalar
from unicron_lib.errors import AgentError

SIGNALS: Mapping[str, signal.Signals] = MappingProxyType(
    {"crash": signal.SIGKILL, "oom": signal.SIGKILL, "hang": signal.SIGSTOP}
)
ORDERS: Mapping[str, Literal["raise", "nan", "spike", "corrupt", "slow", "exit"]] = MappingProxyType(
    {"exception": "raise", "nan": "nan", "spike": "spike", "corrupt": "corrupt", "slow": "slow", "exit": "exit"}
)


class InjectableGpus(Protocol):
    """What looks at the GPUs and can be made to see things."""

    def inject(self, kind: Literal["ecc", "nvlink", "row-remap", "gpu-lost"], gpu: int) -> None:
        """From the next look on, that GPU shows the fault."""

    def hang(self, seconds: float) -> None:
        """From the next look on, and for so long, the driver does not answer."""


class InjectableKernel(Protocol):
    """What reads the kernel's log and can be made to read things."""

    def address_of(self, gpu: int) -> str:
        """The PCI address of a GPU, as the driver writes it."""

    def inject(self, line: str) -> None:
        """Take in a line as if the kernel had written it."""


class InjectableNotices(Protocol):
    """What looks whether the instance is to be taken back, and can be made to see that it is."""

    def inject(self, seconds: float) -> None:
        """From now on the instance is to be taken back in so many seconds."""


class Injection:
    """Does what an `InjectFault` asks for.

    What an agent does to itself, `node-loss` and `partition`, is its uplink's: the answer has to be sent before.
    """

    def __init__(
        self,
        *,
        node: str,
        num_gpus: int,
        ranks: Ranks,
        gpus: InjectableGpus,
        kernel: InjectableKernel,
        notices: InjectableNotices,
    ) -> None:
        self._node = node
        self._num_gpus = num_gpus
        self._ranks = ranks
        self._gpus = gpus
        self._kernel = kernel
        self._notices = notices
        self._links_flapped = 0

    def carry_out(self, command: InjectFault) -> dict[str, Scalar]:
        """Do it; raises AgentError if there is no such rank or GPU here."""
        fault = command.fault
        match fault:
            case "node-loss" | "partition":
                return {}
            case "ecc" | "xid" | "nvlink" | "row-remap" | "gpu-lost":
                return self._harm_gpu(fault, command)
            case "probe-hang":
                self._gpus.hang(command.amount)
                return {}
            case "spot-notice":
                self._notices.inject(command.amount)
                return {}
            case "link-flap":
                return self._flap_link()
            case "crash" | "oom" | "exit" | "hang" | "slow" | "exception" | "nan" | "spike" | "corrupt":
                return self._harm_rank(fault, command)
        assert_never(fault)

    def _harm_rank(self, fault: RankFault, command: InjectFault) -> dict[str, Scalar]:
        rank = self._newest(command.job, command.rank)
        if fault == "oom":
            self._kernel.inject(f"Out of memory: Killed process {rank.pid} (injected)")
        if fault in SIGNALS:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, SIGNALS[fault])
        else:
            rank.order(RankOrder(order=ORDERS[fault], amount=command.amount, text=command.text))
        return {"pid": rank.pid, "generation": rank.generation}

    def _newest(self, job: str, number: int) -> Rank:
        found = self._ranks.where(lambda rank: rank.is_alive and (rank.job, rank.rank) == (job, number))
        if not found:
            raise AgentError(f"rank {number} of job {job} does not run on {self._node}")
        return found[-1]

    def _harm_gpu(self, fault: GpuInjection, command: InjectFault) -> dict[str, Scalar]:
        gpu = command.gpu
        if not 0 <= gpu < self._num_gpus:
            raise AgentError(f"{self._node} has no GPU {gpu}: it has {self._num_gpus}, counted from 0")
        if fault == "xid":
            self._kernel.inject(xid_line(self._kernel.address_of(gpu), int(command.amount)))
        else:
            self._gpus.inject(fault, gpu)
        return {"gpu": gpu}

    def _flap_link(self) -> dict[str, Scalar]:
        """A port that nobody has, another one each time, goes down as often as makes it flap."""
        self._links_flapped += 1
        port = f"injected{self._links_flapped}"
        for _ in range(LinkRules().flaps):
            for state in ("DOWN", "ACTIVE"):
                self._kernel.inject(f"{port}: Port: 1 Link {state}")
        return {"port": port}


def xid_line(address: str, xid: int) -> str:
    """What the NVIDIA driver logs when the GPU at a PCI address reports an Xid."""
    return f"NVRM: Xid (PCI:{address}): {xid}, pid='<unknown>', name=<unknown>, injected"
