"""Results of Prefect's tasks come from the store, which others may have written to: only what is plain is read."""

import asyncio
import base64
import json
import pickle

import pytest
from prefect.results import ResultRecord, ResultRecordMetadata
from prefect.serializers import JSONSerializer, PickleSerializer

from tasks.results import UnicronStore, why_refused
from unicron_lib.adapters.stores import open_store
from unicron_lib.domain.plans import Plan, PlanKind
from unicron_lib.errors import StoreError

PLAN = Plan(id="p", kind=PlanKind.REALLOCATE, incidents=("i",), attempt=1, basis_seq=3, reason="r", gpus={"a": 2})


def record_of(result: object, serializer=None) -> bytes:
    metadata = ResultRecordMetadata(storage_key="k", serializer=serializer or JSONSerializer())
    return ResultRecord(result=result, metadata=metadata).serialize()


@pytest.mark.parametrize("result", [PLAN, {"iteration": 3, "manifest": None, "skipped": ""}, None])
def test_what_tasks_return_comes_back(result, tmp_path) -> None:
    store = UnicronStore(url=tmp_path.as_uri())
    asyncio.run(store.write_path("k", record_of(result)))
    assert ResultRecord.deserialize(asyncio.run(store.read_path("k"))).result == result


def changed(**metadata: object) -> bytes:
    record = json.loads(record_of({}))
    record["metadata"] |= metadata
    return json.dumps(record).encode()


def without_serializer() -> bytes:
    record = json.loads(record_of({}))
    del record["metadata"]["serializer"]
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(record_of({}, PickleSerializer()), id="pickle"),
        pytest.param(without_serializer(), id="none, which means pickle"),
        pytest.param(base64.b64encode(pickle.dumps({})), id="a bare pickle"),
        pytest.param(changed(serializer={"type": "json", "jsonlib": "pickle"}), id="pickle as a kind of JSON"),
        pytest.param(changed(serializer={"type": "json", "object_decoder": "os.system"}), id="another decoder"),
        pytest.param(changed(serializer=["json"]), id="no serializer"),
        pytest.param(record_of({"a": [{"__class__": "subprocess.getoutput", "data": {"cmd": "id"}}]}), id="a function"),
        pytest.param(record_of({"__exc_type__": "shutil.Error", "message": ""}), id="an exception"),
        pytest.param(record_of({"__class__": ["x"], "data": 1}), id="no name"),
        pytest.param(json.dumps({"data": "e30=", "serializer": {"type": "json"}}).encode(), id="Prefect's older form"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_record_that_names_code_is_refused(content: bytes, tmp_path) -> None:
    assert why_refused(content)
    open_store(tmp_path.as_uri()).put("results/k", content)
    with pytest.raises(StoreError, match="results/k is not read: it "):
        asyncio.run(UnicronStore(url=tmp_path.as_uri()).read_path("k"))
