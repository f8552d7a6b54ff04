"""`check-nodes`: which of the nodes without ranks are faulty. Isolates those, releases the cleared ones.

`python -m flows.checking NODE...` runs it here and prints the findings as JSON, also without a Prefect server.
"""

import argparse
import asyncio
import itertools
import json
import logging
import sys
import time
from dataclasses import asdict

from prefect import flow

from flows.response import Call, as_task, plain
from flows.watching import prefect_answers
from tasks.checking import conclude, meet
from tasks.reporting import report_check
from tasks.services import services
from unicron_lib.diagnosis.check_consequences import to_check
from unicron_lib.diagnosis.check_waves import next_groups
from unicron_lib.diagnosis.node_check import CheckVerdict, Finding, Meeting, verdicts
from unicron_lib.errors import UnicronError, UserError

DEADLINE_S = 60.0
Row = dict[str, object]
log = logging.getLogger("unicron.checking")


@flow(name="check-nodes", description="Find the faulty ones among nodes without ranks: isolate them, release the cleared.")
async def check_nodes(nodes: list[str] | None = None, deadline_s: float = DEADLINE_S) -> list[Row]:
    """Check `nodes`, or all without ranks; a meeting of two may take `deadline_s`. Raises UserError for one that trains."""
    rows = await check(as_task, nodes or [], deadline_s)
    await report_check(rows)
    return rows


async def check(call: Call, names: list[str], deadline_s: float) -> list[Row]:
    """Let nodes meet until nothing more can be found out, then journal what follows; a row for each node."""
    state = await asyncio.to_thread(services().journal.refresh)
    nodes = {node.id: node for node in to_check(state, names)}
    began = time.time()
    meetings: list[Meeting] = []
    # Newer than those of any check before, so that a check that died on the way is not in the way.
    generations = itertools.count(int(began * 1000))
    for turn in itertools.count():
        groups = next_groups(tuple(nodes), meetings)
        if not groups:
            break
        meetings += await asyncio.gather(*(call(meet, group, turn, next(generations), deadline_s) for group in groups))
    findings = tuple(verdicts(tuple(nodes), meetings).values())
    await call(conclude, f"node-check/{began:.3f}", findings, nodes)
    return [_row(finding) for finding in findings]


def _row(finding: Finding) -> Row:
    return asdict(finding) | {"verdict": str(finding.verdict), "meetings": len(finding.meetings)}


async def run_check(nodes: list[str], deadline_s: float) -> list[Row]:
    """Check them as a flow run, or without Prefect if it is away or breaks off. Raises UserError for one that trains."""
    if await prefect_answers():
        try:
            return await check_nodes(nodes, deadline_s)
        except UnicronError:
            raise
        except Exception:  # whatever Prefect's trouble is, the check goes on without it
            log.exception("the flow run of the check broke off; checking anew without Prefect")
    return await check(plain, nodes, deadline_s)


def main() -> int:
    """Exit code 1 if a node is faulty, 2 for a node that cannot be checked."""
    parser = argparse.ArgumentParser(prog="python -m flows.checking", description=__doc__)
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="none: all nodes without ranks")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="SECONDS", help="of a meeting (%(default)g)")
    arguments = parser.parse_args()
    try:
        rows = asyncio.run(run_check(arguments.nodes, arguments.deadline))
    except UnicronError as error:
        sys.stderr.write(f"unicron: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    sys.stdout.write(json.dumps(rows) + "\n")
    return int(any(row["verdict"] == CheckVerdict.FAULTY for row in rows))


if __name__ == "__main__":
    sys.exit(main())
