"""On a whole cluster: once an incident is healed, its artifact and `explain` tell why, from the log of the rank itself."""

import json
import urllib.request

from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.failures import ErrorKind


def artifacts(site, key: str) -> list[dict]:
    body = json.dumps({"artifacts": {"key": {"any_": [key]}}}).encode()
    request = urllib.request.Request(
        f"{site.ui_url}/api/artifacts/filter", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_what_the_rank_logged_is_found_and_told_beside_the_recovery(pair):
    known = set(pair.state.incidents)
    pair.cli("inject", "exception", "big/1", "--text", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")

    def diagnosed(state) -> bool:
        return any(it.diagnosis for name, it in state.incidents.items() if name not in known)

    state = pair.until("a diagnosis", diagnosed)
    (incident,) = [it for it in pair.new_failures(known) if it.diagnosis]
    told = incident.diagnosis
    assert told.kind == ErrorKind.OUT_OF_MEMORY
    assert "CUDA out of memory" in told.root_cause
    assert any("/logs/big/g" in line and "-r1.log:" in line for line in told.evidence), told.evidence
    assert told.unread == ()
    assert incident.status is IncidentStatus.CLOSED
    assert told.at > state.plans[incident.plan].finished_at, "no recovery waits for it"
    assert "Why, as the logs tell" in pair.cli("explain", incident.id).stdout
    pair.wait("the artifact", lambda: any("Why, as the logs tell" in it["data"] for it in artifacts(pair.site, incident.id)))
    (shown,) = [it for it in artifacts(pair.site, incident.id) if "Why, as the logs tell" in it["data"]]
    assert shown["flow_run_id"], "it is found beside the run that healed the incident"
    pair.check_journal()
