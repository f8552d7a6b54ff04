"""`python -m unicron_lib.agent`: the daemon of a node."""

import argparse
import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from unicron_lib.agent.access import read_token
from unicron_lib.agent.daemon import LEAVE_S, AgentOptions, run_agent
from unicron_lib.agent.environment import NodeFacts
from unicron_lib.agent.gpus import gpu_model, num_devices
from unicron_lib.agent.instance import AUTO, notices_from
from unicron_lib.agent.kernel_log import KERNEL_LOG
from unicron_lib.agent.rendezvous import RENDEZVOUS_TARGET
from unicron_lib.agent.supervisor import RANK_TARGET
from unicron_lib.detection.xid import XidRules
from unicron_lib.errors import UserError

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; 2 for what the user has to correct."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        asyncio.run(run_agent(_agent_options(options)))
    except UserError as error:
        print(f"unicron agent: {error}", file=sys.stderr)  # noqa: T201  # the user's answer
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m unicron_lib.agent", description=__doc__)
    parser.add_argument("--controller", required=True, metavar="URL", help="ws:// or wss://HOST:PORT/v1/agents")
    parser.add_argument("--token-file", required=True, type=Path)
    parser.add_argument("--node", required=True, help="the node's name, unique in the cluster")
    parser.add_argument("--address", required=True, help="where ranks of other nodes reach this one")
    parser.add_argument("--num-gpus", required=True, type=int)
    parser.add_argument(
        "--imagined-gpus",
        action="store_true",
        help="they are only counted, whatever GPUs this machine has: for a local cluster",
    )
    parser.add_argument("--run-dir", required=True, type=Path, help="for logs, ledgers and error files")
    parser.add_argument("--rack", default="", help="nodes of the same rack are close: jobs are kept within few racks")
    parser.add_argument("--pool", default="", help="the kind of instance: each job uses the nodes of one pool")
    parser.add_argument("--interface", help="network device for the ranks' traffic")
    parser.add_argument("--preload", action="append", metavar="MODULE", help="what the fork server imports ahead")
    parser.add_argument("--rank-target", default=RANK_TARGET, metavar="MODULE:FUNCTION")
    parser.add_argument("--rendezvous-target", default=RENDEZVOUS_TARGET, metavar="MODULE:FUNCTION")
    _add_watches(parser)
    return parser


def _add_watches(parser: argparse.ArgumentParser) -> None:
    """What the agent looks at beside its ranks."""
    parser.add_argument(
        "--kernel-log",
        default=str(KERNEL_LOG),
        metavar="PATH",
        help="device, FIFO or file with the kernel's messages; `none`: they are not watched (default: %(default)s)",
    )
    parser.add_argument(
        "--spot-notices",
        default=AUTO,
        metavar="URL",
        help="the metadata service that tells when this instance is taken back; `auto`: EC2's, on EC2; `off`: nobody is asked",
    )
    parser.add_argument(
        "--leave-s",
        type=float,
        default=LEAVE_S,
        metavar="SECONDS",
        help="so long after SIGTERM the agent waits until its ranks are saved and let go (default: %(default)g)",
    )
    parser.add_argument(
        "--xid-repeats",
        type=int,
        default=XidRules().repeats,
        help="a program's fault (Xid 13, 31, ...) is the GPU's when it has it that many times (default: %(default)s)",
    )
    parser.add_argument(
        "--xid-window",
        type=float,
        default=XidRules().repeat_window_s,
        metavar="SECONDS",
        help="within which it has them (default: %(default)g)",
    )


def _agent_options(options: argparse.Namespace) -> AgentOptions:
    if not NODE_NAME.fullmatch(options.node):
        raise UserError(f"--node is {options.node!r}: a node's name has 1 to 63 letters, digits, dots, dashes and underscores")
    if options.num_gpus < 0:
        raise UserError(f"--num-gpus is {options.num_gpus}, it must not be negative")
    if not options.leave_s >= 0:
        raise UserError(f"--leave-s is {options.leave_s:g}, it must not be negative")
    devices = [name for _, name in socket.if_nameindex()]
    if options.interface and options.interface not in devices:
        raise UserError(f"--interface {options.interface}: there is no such device here, only {', '.join(devices)}")
    try:
        options.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run directory {options.run_dir}: {error.strerror}; name another one") from None
    facts = NodeFacts(
        node=options.node,
        address=options.address,
        num_gpus=options.num_gpus,
        run_dir=options.run_dir.resolve(),
        interface=options.interface,
        rack=options.rack,
        pool=options.pool,
        gpu_model=gpu_model(),
        has_gpus=options.num_gpus > 0 and num_devices() > 0 and not options.imagined_gpus,
    )
    preload = options.preload if options.preload is not None else [options.rank_target.partition(":")[0]]
    return AgentOptions(
        facts=facts,
        controller=options.controller,
        token=read_token(options.token_file),
        rank_target=options.rank_target,
        rendezvous_target=options.rendezvous_target,
        preload=preload,
        xid_rules=_xid_rules(options),
        notices_from=notices_from(options.spot_notices, os.environ),
        leave_s=options.leave_s,
        kernel_log=None if options.kernel_log == "none" else Path(options.kernel_log),
    )


def _xid_rules(options: argparse.Namespace) -> XidRules:
    try:
        return XidRules(repeats=options.xid_repeats, repeat_window_s=options.xid_window)
    except ValueError as error:
        raise UserError(f"--xid-repeats or --xid-window: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
