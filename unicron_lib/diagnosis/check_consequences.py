"""What a node check may touch, and what follows from its verdicts. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from unicron_lib.diagnosis.node_check import CheckVerdict, Finding
from unicron_lib.domain.checked import NodesChecked
from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.events import FailureDetected, NodeNoted, NodeReleased
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.errors import UserError

Consequence = FailureDetected | NodeReleased | NodeNoted | NodesChecked
SLOW, SUSPECTED = "slow_in_check", "suspect_in_check"
CHECKABLE = frozenset({NodeStatus.READY, NodeStatus.SNOOZED, NodeStatus.QUARANTINED})
_KIND_OF_TEST: Mapping[str, ErrorKind] = {"memory": ErrorKind.ECC_ERROR, "matmul": ErrorKind.CUDA_ERROR}


def to_check(state: ClusterState, names: Sequence[str]) -> tuple[Node, ...]:
    """The named nodes; with no name the idle ones, but none that is isolated: being cleared would release it.

    Raises UserError for a node that may not be checked.
    """
    if not names:
        idle = (node for _, node in sorted(state.nodes.items()) if not _objection(state, node))
        return tuple(node for node in idle if node.status is not NodeStatus.QUARANTINED)
    unknown = sorted(set(names) - set(state.nodes))
    if unknown:
        raise UserError(f"no node {unknown[0]!r}: there are {', '.join(sorted(state.nodes)) or 'none'}")
    nodes = tuple(state.nodes[name] for name in dict.fromkeys(names))
    for node in nodes:
        if objection := _objection(state, node):
            raise UserError(f"{node.id} cannot be checked: {objection}")
    return nodes


def _objection(state: ClusterState, node: Node) -> str:
    if jobs := state.jobs_on(node.id):
        return f"it trains {', '.join(jobs)}, and only nodes without ranks are checked"
    return "" if node.status in CHECKABLE else f"it is {node.status}"


def consequences(
    state: ClusterState, findings: Iterable[Finding], *, check: str, nodes: Mapping[str, Node], at: float
) -> Iterator[Consequence]:
    """What to journal: the faulty have failed, the good have passed and leave quarantine, the slow and suspected are noted.

    `nodes` are as they were when the check began: of one that has changed since (another life of its agent, isolated for
    something new) nothing is said.
    """
    passed: dict[str, str] = {}
    for finding in findings:
        before, node = nodes[finding.node], state.nodes.get(finding.node)
        if node is not None and (node.boot, node.status, node.since) == (before.boot, before.status, before.since):
            yield from _of_node(finding, node, check, at)
            passed |= {node.id: node.boot} if finding.verdict is CheckVerdict.GOOD else {}
    if passed:
        yield NodesChecked(id=f"{check}/passed", at=at, passed=passed)


def _of_node(finding: Finding, node: Node, check: str, at: float) -> Iterator[Consequence]:
    told = f"{check}/{node.id}"
    match finding.verdict:
        case CheckVerdict.FAULTY:
            yield FailureDetected(id=told, at=at, failure=_failure(finding, node, told, at))
        case CheckVerdict.STRAGGLER:
            yield _note(node, SLOW, told, at, text=f"slow in a node check: {finding.reason}")
        case CheckVerdict.GOOD:
            yield from (_note(node, code, f"{told}/{code}", at, text="") for code in (SLOW, SUSPECTED) if code in node.notes)
            if node.status is NodeStatus.QUARANTINED and not node.is_isolated_by_hand:
                yield NodeReleased(id=told, at=at, node=node.id, reason=f"a node check cleared it: {finding.reason}")
        case CheckVerdict.UNDETERMINED:
            if finding.suspected:
                yield _note(
                    node, SUSPECTED, told, at, text=f"a node check could neither clear nor convict it: {finding.reason}"
                )


def _failure(finding: Finding, node: Node, told: str, at: float) -> Failure:
    kinds = [_KIND_OF_TEST[fault.test] for fault in finding.faults]
    return Failure(
        id=told,
        kind=kinds[0] if kinds else ErrorKind.NETWORK_ERROR,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=at,
        node=node.id,
        boot=node.boot,
        evidence=f"node check: {finding.reason}",
    )


def _note(node: Node, code: str, told: str, at: float, *, text: str) -> NodeNoted:
    return NodeNoted(id=told, at=at, node=node.id, boot=node.boot, code=code, text=text, active=bool(text))
