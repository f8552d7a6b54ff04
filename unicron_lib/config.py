"""Settings of the control plane, read from the environment once per process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from unicron_lib.agent.access import read_token
from unicron_lib.domain.check_policy import DEFAULT_CHECKS, NEVER, CheckWhen
from unicron_lib.errors import UserError

DEFAULT_MTBF_GPU_S = 6.2e7
"""Mean time between failures of one GPU: 6.5 failures per 1,000 node-days (Meta RSC-1) on nodes of 8, about two years."""


NUMBERS = (
    *("mtbf_gpu_s", "granularity_gpus", "spare_gpus", "solve_limit_s", "drain_s", "command_s", "first_iteration_s"),
    *("repair_s", "replace_s", "node_dollars_per_h", "dollars_per_eflop", "max_jobs_per_node", "rebalance_s"),
    *("replica_bytes_per_s", "store_bytes_per_s"),
)
COUNTS = ("granularity_gpus", "spare_gpus", "max_jobs_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the parts of the control plane find each other, and the numbers that planning needs.

    Allocations are multiples of `granularity_gpus`; 0 means
    that every size a job's table offers may be had. `spare_gpus` are held back for the next node loss. At most
    `max_jobs_per_node` jobs share a node, any number if it is 0. All `_s` are seconds.
    With a `repair_s` above 0, plans for a node loss compare what else could be done, at these prices; a `dollars_per_eflop`
    of 0 means that nobody has said what FLOP are worth. `pools_file` has the prices and limits of several pools; whether
    jobs had better change pools is looked at every `rebalance_s`, never if it is 0. At `replica_bytes_per_s` a job's whole
    state goes on from a surviving replica or a node's memory, at `store_bytes_per_s` from the object store. `check_nodes` says
    which idle nodes are checked unasked: those that `rejoined` after they had failed, those that a new job may `launch` on, all
    once a day that are `idle`.
    """

    store_url: str
    controller_url: str
    token: str
    mtbf_gpu_s: float = DEFAULT_MTBF_GPU_S
    granularity_gpus: int = 0
    spare_gpus: int = 0
    max_jobs_per_node: int = 0
    solve_limit_s: float = 5.0
    drain_s: float = 10.0
    command_s: float = 60.0
    first_iteration_s: float = 180.0
    repair_s: float = 0.0
    replace_s: float = 600.0
    node_dollars_per_h: float = 0.0
    dollars_per_eflop: float = 0.0
    rebalance_s: float = 600.0
    replica_bytes_per_s: float = 1e9
    store_bytes_per_s: float = 2e9
    pools_file: str = ""
    check_nodes: frozenset[CheckWhen] = DEFAULT_CHECKS

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """Read UNICRON_STORE_URL, UNICRON_CONTROLLER_URL, UNICRON_TOKEN_FILE and, if set, the numbers.

        Raises UserError naming the variable that is missing or unusable.
        """
        numbers = {name: number for name in NUMBERS if (number := _number(env, f"UNICRON_{name.upper()}")) is not None}
        granularity, spares, jobs = (int(numbers.pop(name, 0)) for name in COUNTS)
        return cls(
            store_url=_required(env, "UNICRON_STORE_URL"),
            controller_url=_required(env, "UNICRON_CONTROLLER_URL"),
            token=read_token(Path(_required(env, "UNICRON_TOKEN_FILE"))),
            granularity_gpus=granularity,
            spare_gpus=spares,
            max_jobs_per_node=jobs,
            pools_file=env.get("UNICRON_POOLS_FILE", ""),
            check_nodes=_checks(env, "UNICRON_CHECK_NODES"),
            **numbers,
        )


def _required(env: Mapping[str, str], key: str) -> str:
    value = env.get(key, "")
    if not value:
        raise UserError(f"{key} is not set: run inside `unicron up`, or see README, 'On your own cluster'")
    return value


def _checks(env: Mapping[str, str], key: str) -> frozenset[CheckWhen]:
    names = [name.strip() for name in env.get(key, "").split(",") if name.strip()]
    if not names:
        return DEFAULT_CHECKS
    unknown = sorted(set(names) - set(get_args(CheckWhen))) if names != [NEVER] else []
    if unknown:
        told = f"choose {NEVER}, or some of {', '.join(get_args(CheckWhen))}, with commas between them"
        raise UserError(f"{key} has {unknown[0]!r}: {told}")
    return frozenset(cast("list[CheckWhen]", [name for name in names if name != NEVER]))


def _number(env: Mapping[str, str], key: str) -> float | None:
    text = env.get(key)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{key} is {text!r}: it must be a number") from None
    if not 0 <= value < float("inf"):
        raise UserError(f"{key} is {text}: it must be a finite number that is not negative")
    return value
