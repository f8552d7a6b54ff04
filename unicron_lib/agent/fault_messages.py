"""Harm that is done on purpose: which, to whom, and how much of it."""

from dataclasses import dataclass
from typing import Literal

RankFault = Literal["crash", "oom", "exit", "hang", "slow", "exception", "nan", "spike", "corrupt"]
GpuInjection = Literal["ecc", "xid", "nvlink", "row-remap", "gpu-lost"]
Fault = Literal[RankFault, GpuInjection, "link-flap", "probe-hang", "node-loss", "partition", "spot-notice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectFault:
    """Do harm on purpose.

    To a rank: `crash` (SIGKILL), `oom` (the same, by the kernel as far as its log tells), `exit` (with the code `amount`),
    `hang` (SIGSTOP), `slow` (by the factor `amount`), `exception` (what `text` says), `nan`, `spike` (for `amount` iterations),
    `corrupt` (its gradients are a little wrong from then on).
    To GPU `gpu` of the node, as far as its probes can tell: `ecc`, `xid` (of the number `amount`), `nvlink`, `row-remap`,
    `gpu-lost`. To a port of the node, as far as the kernel's log tells: `link-flap`. To the process that asks the driver:
    `probe-hang` (no answer for `amount` seconds). To the agent: `node-loss`, `partition` (no word to or from the controller
    for `amount` seconds), `spot-notice` (its instance is taken back in `amount` seconds).
    """

    step: str
    fault: Fault
    job: str = ""
    rank: int = 0
    gpu: int = 0
    amount: float = 0.0
    text: str = ""
    type: Literal["inject_fault"] = "inject_fault"
