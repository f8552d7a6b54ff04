"""A node check as a flow run on a real server: a task a meeting, and a table of the verdicts."""

import json

from checked_agents import IDLE, put_in_place
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect_site import until

from flows import response
from flows.checking import check_nodes
from unicron_lib.domain.events import FailureDetected


async def test_the_run_shows_each_meeting_and_the_verdicts(with_prefect, monkeypatch):
    agents = put_in_place(response.services(), monkeypatch)
    agents.faulty = {"node-4"}
    rows = await check_nodes(IDLE, 1.0)
    assert [row["verdict"] for row in rows] == ["good", "faulty", "good", "good"]
    async with get_client() as client:
        (run,) = await client.read_flow_runs()

        async def all_told():
            tasks = await client.read_task_runs()
            meetings = [task for task in tasks if task.flow_run_id == run.id and task.name.startswith("turn ")]
            return len(meetings) == len(agents.groups) == 4

        await until("the tasks of the run", all_told)  # the server learns of tasks by events
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["node-check"]))
        (artifact,) = await client.read_artifacts(artifact_filter=key)
    table = json.loads(artifact.data)
    assert [(row["node"], row["verdict"]) for row in table] == [(row["node"], row["verdict"]) for row in rows]
    (told,) = (it.event for it in with_prefect.journal.entries() if isinstance(it.event, FailureDetected))
    assert told.failure.node == "node-4"
