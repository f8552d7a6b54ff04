"""The metadata service of EC2 as it is documented, on a real socket: with tokens, without a notice, broken, slow, gone."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from metadata_service import SCHEDULED, SPOT, MetadataService

from unicron_lib.adapters import instance_metadata
from unicron_lib.adapters.instance_metadata import InstanceMetadata, Notice
from unicron_lib.errors import MetadataError

TOKEN = "PUT /latest/api/token"


@pytest.fixture
def service() -> Iterator[MetadataService]:
    made = MetadataService()
    yield made
    made.close()


@pytest.fixture
async def metadata(service: MetadataService) -> AsyncIterator[InstanceMetadata]:
    made = InstanceMetadata(service.url)
    yield made
    await made.close()


async def test_no_notice_is_no_notice(service: MetadataService, metadata: InstanceMetadata) -> None:
    assert await metadata.interruption() is None
    assert await metadata.scheduled() == ()
    assert service.requests == [TOKEN, f"GET {SPOT}", f"GET {SCHEDULED}"], "one token serves for long"


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
async def test_an_interruption_is_told_with_its_time(service: MetadataService, metadata: InstanceMetadata, action: str) -> None:
    service.announces(action, "2017-09-18T08:22:00Z")
    assert await metadata.interruption() == Notice(what=f"a spot interruption notice says {action}", at=1505722920.0)


async def test_a_token_that_is_over_is_replaced(service: MetadataService, metadata: InstanceMetadata) -> None:
    await metadata.interruption()
    service.expire_tokens()
    service.announces("stop", "2017-09-18T08:22:00Z")
    assert await metadata.interruption()
    assert service.requests.count(TOKEN) == 2


async def test_scheduled_ends_are_told_and_what_does_not_end_the_instance_is_not(
    service: MetadataService, metadata: InstanceMetadata
) -> None:
    """As in AWS' documentation."""
    event = {
        "NotBefore": "21 Jan 2019 09:00:43 GMT",
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59937288b749b32",
        "NotAfter": "21 Jan 2019 09:17:23 GMT",
        "State": "active",
    }
    harmless = {**event, "Code": "system-maintenance"}
    over = {**event, "State": "completed"}
    service.documents[SCHEDULED] = json.dumps([harmless, event, over]).encode()
    (notice,) = await metadata.scheduled()
    assert notice == Notice(what="EC2 has scheduled system-reboot (scheduled reboot)", at=1548061243.0)


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"\xff\xfe", b"[]", b"{}", b'{"action": "stop", "time": "soon"}', b'{"action": 1, "time": null}']
)
async def test_garbage_is_an_error_and_no_notice(service: MetadataService, metadata: InstanceMetadata, body: bytes) -> None:
    service.documents[SPOT] = body
    with pytest.raises(MetadataError, match="something unknown"):
        await metadata.interruption()


@pytest.mark.parametrize("when", ['"in a while"', "null", "17"])
async def test_a_scheduled_time_that_is_none_is_an_error(
    service: MetadataService, metadata: InstanceMetadata, when: str
) -> None:
    service.documents[SCHEDULED] = f'[{{"NotBefore": {when}, "Code": "system-reboot"}}]'.encode()
    with pytest.raises(MetadataError, match="something unknown"):
        await metadata.scheduled()


async def test_a_service_that_gives_no_token_is_an_error(service: MetadataService, metadata: InstanceMetadata) -> None:
    """So it is where the service is switched off, or version 2 of it."""
    service.refuses_tokens = True
    with pytest.raises(MetadataError, match="answers 403 when it is asked for a token"):
        await metadata.interruption()


async def test_a_service_that_does_not_answer_is_given_up(
    service: MetadataService, metadata: InstanceMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    await metadata.interruption()
    monkeypatch.setattr(instance_metadata, "CALL_S", 0.05)
    service.silent.set()
    with pytest.raises(MetadataError, match=r"has not answered within 0\.05 s"):
        await metadata.interruption()
    service.silent.clear()
    monkeypatch.undo()
    assert await metadata.interruption() is None, "and it is asked again"


async def test_a_service_that_is_gone_is_an_error(service: MetadataService, metadata: InstanceMetadata) -> None:
    service.close()
    with pytest.raises(MetadataError, match="out of reach"):
        await metadata.interruption()


def test_an_agent_off_ec2_does_not_even_import_a_client() -> None:
    code = "import sys, unicron_lib.agent.__main__; print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.split() == ["False"]
