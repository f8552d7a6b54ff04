"""The pure parts of the agent."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from unicron_lib.agent.access import bearer, is_admitted, read_token
from unicron_lib.agent.bell import Bell
from unicron_lib.agent.environment import NodeFacts, rank_environment
from unicron_lib.agent.excerpt import TEXT_LIMIT, excerpt
from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.memo import StepMemo
from unicron_lib.agent.messages import LaunchRanks, Reply
from unicron_lib.agent.oom import OomWatch, oom_kills
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import UserError

FINISHED = RankFinished(job="a", generation=1, rank=0, iteration=9, loss=1.0)


def test_a_fence_never_goes_back() -> None:
    fence = Fence()
    assert fence.admits("a", 0)
    fence.raise_to("a", 3)
    fence.raise_to("a", 2)
    assert [fence.admits("a", generation) for generation in (2, 3, 4)] == [False, True, True]
    assert fence.admits("b", 1), "each job has its own"
    assert "generation 3" in fence.refusal("a", 2)


def test_a_memo_keeps_good_answers_only() -> None:
    memo = StepMemo(capacity=2)
    memo.keep(Reply(step="bad", ok=False, error="busy"))
    assert memo.recall("bad") is None
    first = Reply(step="1", ok=True, result={"port": 1})
    memo.keep(first)
    memo.keep(Reply(step="1", ok=True, result={"port": 2}))
    assert memo.recall("1") is first
    for step in ("2", "3"):
        memo.keep(Reply(step=step, ok=True))
    assert memo.recall("1") is None, "the oldest makes room"
    assert memo.recall("3") is not None


def test_an_outbox_numbers_keeps_and_forgets() -> None:
    outbox = Outbox(node="n", boot="b")
    ids = [outbox.add(FINISHED, at=float(number)).id for number in range(3)]
    assert ids == ["n/b/0", "n/b/1", "n/b/2"]
    assert {name: [told.seq for told in kept] for name, kept in outbox.at_hand.items()} == {"a/0": [0, 1, 2]}
    outbox.acknowledge([1, 1, 77])
    assert {name: [told.seq for told in kept] for name, kept in outbox.at_hand.items()} == {"a/0": [0, 2]}
    assert len(outbox) == 2
    outbox.start_over("c")
    assert outbox.at_hand == {}
    assert outbox.add(FINISHED, at=0.0).id == "n/c/0"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/memory.events": "low 0\noom 2\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "4:memory:/y\n0::/\n", "sys/fs/cgroup/memory/y/memory.oom_control": "oom_kill 5\n"}, 5),
        ({"sys/fs/cgroup/memory.events": "oom_kill 1\n"}, 1),
    ],
)
def test_oom_kills_are_read_where_there_is_a_count(tmp_path: Path, files: dict[str, str], count: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == count


def test_the_oom_watch_tells_each_growth_once(tmp_path: Path) -> None:
    events = tmp_path / "sys/fs/cgroup/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("oom_kill 4\n")
    watch = OomWatch(tmp_path)
    assert not watch.struck()
    events.write_text("oom_kill 5\n")
    assert watch.struck()
    assert not watch.struck()
    assert not OomWatch(tmp_path / "nowhere").struck()


def test_long_texts_keep_head_and_tail() -> None:
    assert excerpt("short") == "short"
    text = excerpt("head" + "x" * 50_000_000 + "tail")
    assert text.startswith("head")
    assert text.endswith("tail")
    assert len(text) <= TEXT_LIMIT
    assert excerpt(text) == text
    assert excerpt("from the file system: \udcff") == "from the file system: ?"


def launch() -> LaunchRanks:
    return LaunchRanks(
        step="s",
        job="a",
        generation=3,
        spec=JobSpec(job="a", throughput_flops={2: 1e9}),
        layout=Layout(dp=8),
        ranks=((5, 1), (4, 3)),
        world_size=8,
        node_rank=2,
        num_nodes=4,
        master_addr="10.0.0.1",
        master_port=1234,
        store_url="s3://b/p",
    )


def test_the_environment_of_a_rank(tmp_path: Path) -> None:
    facts = NodeFacts(node="n", address="10.0.0.2", num_gpus=4, run_dir=tmp_path, interface="eth1", has_gpus=True)
    env = rank_environment(facts, launch(), 5, Path("/s"))
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert (env["UNICRON_TP"], env["UNICRON_PP"]) == ("1", "1")
    cut = rank_environment(facts, replace(launch(), layout=Layout(tp=4, pp=2)), 5, Path("/s"))
    assert (cut["UNICRON_TP"], cut["UNICRON_PP"]) == ("4", "2")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("2", "4")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1", "1234", "eth1")
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as NVML counts, which says what GPU is broken"
    assert env["CUDA_VISIBLE_DEVICES"] == "3,1", "LOCAL_RANK 1 is device 1, the GPU of rank 5"
    assert '"throughput_flops":{"2":1000000000.0}' in env["UNICRON_JOB_SPEC"]
    assert "UNICRON_RESTORE_FROM" not in env


@pytest.mark.parametrize(
    ("layout", "keepers"), [(Layout(dp=8), {4}), (Layout(tp=2, dp=4), {4, 5}), (Layout(pp=4, dp=2), {4, 5})]
)
def test_one_rank_of_a_node_keeps_what_several_have(tmp_path: Path, layout: Layout, keepers: set[int]) -> None:
    facts = NodeFacts(node="n", address="10.0.0.2", num_gpus=4, run_dir=tmp_path)
    command = replace(launch(), layout=layout, ranks=((4, 0), (5, 1), (8, 2)))
    told = {rank: rank_environment(facts, command, rank, Path("/s")) for rank, _ in command.ranks}
    assert {rank for rank, env in told.items() if env.get("UNICRON_MEMORY_KEEPS") == "1"} == keepers
    sent = rank_environment(facts, replace(command, memory_peers=("a:1",)), 4, Path("/s"))
    assert sent["UNICRON_MEMORY_KEEPS"] == "2"


def test_gpus_that_do_not_exist_are_not_named(tmp_path: Path) -> None:
    facts = NodeFacts(node="n", address="10.0.0.2", num_gpus=4, run_dir=tmp_path)
    env = rank_environment(facts, launch(), 5, Path("/s"))
    assert not {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(env)


@pytest.mark.parametrize("content", [None, "", " \n", "two words", "schlüssel", b"\xff\xfe"])
def test_a_bad_token_file_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=str(path)):
        read_token(path)


def test_only_the_token_is_admitted(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    token = read_token(tmp_path / "token")
    assert is_admitted(bearer(token)["Authorization"], token)
    for header in (None, "", "secret", "Bearer ", "Bearer secre", "Bearer secrets", "bearer secret", "Bearer gehéim"):
        assert not is_admitted(header, token)


async def test_a_bell_wakes_all_who_wait() -> None:
    bell, state = Bell(), [0]
    waiting = [asyncio.create_task(bell.until(lambda n=n: state[0] >= n, timeout_s=10)) for n in (1, 2)]
    await asyncio.sleep(0)
    state[0] = 2
    bell.ring()
    assert await asyncio.gather(*waiting) == [True, True]
    assert not await bell.until(lambda: False, timeout_s=0)
