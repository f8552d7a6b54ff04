"""What the kernel's log says, how it is followed, and what an agent makes of it."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.agent.gpu_inventory import has_driver, imagined_gpus, listed_gpus
from unicron_lib.agent.kernel_log import KernelLog
from unicron_lib.agent.log_source import LineSplitter, _records, follow
from unicron_lib.agent.messages import GpuFault, NodeNotice
from unicron_lib.agent.oom import OomWatch
from unicron_lib.detection.findings import Finding, HardwareFault, HardwareNotice
from unicron_lib.detection.gpu_names import GpuName
from unicron_lib.detection.kernel_log import LINE_LIMIT_BYTES, DamageLine, GpuLine, LinkLine, OomLine, Said, XidLine, parse
from unicron_lib.detection.kernel_watch import KernelWatch
from unicron_lib.detection.link import MAX_PORTS, LinkRules, LinkWatch

DEADLINE_S = 10.0
PREFIXES = [
    "",
    "4,1234,567890,-;",
    "[ 1843.308145] ",
    "[Mon Nov 30 04:22:01 2026] ",
    "Nov 30 04:22:01 host kernel: ",
    "2026-11-30T04:22:01,859532+00:00 ",
    "kern  :err   : 2026-11-30T04:22:01,859532+00:00 ",
    "2026-11-30T04:22:01.123456+00:00 gpu-1 kernel: [ 1843.308145] ",
]
FALLEN = "NVRM: Xid (PCI:0000:61:00): 79, pid=1234, name=python, GPU has fallen off the bus."
SWITCH = "the NVSwitch at 0000:c1:00"

LINES: list[tuple[str, Said | None]] = [
    (FALLEN, XidLine(pci="0000:61:00", code=79, pid=1234, text="GPU has fallen off the bus.")),
    (
        "NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        XidLine(pci="0000:61:00", code=79, text="GPU has fallen off the bus."),
    ),
    (
        "NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.",
        XidLine(pci="0000:61:00", code=79, text="GPU has fallen off the bus."),
    ),
    (
        "NVRM: Xid (PCI:0000:C1:00): 31, pid=77, Ch 00000010, intr 10000000. MMU Fault",
        XidLine(pci="0000:c1:00", code=31, pid=77, text="Ch 00000010, intr 10000000. MMU Fault"),
    ),
    ("NVRM: Xid (0000:03:00): 13, 0002 00000000", XidLine(pci="0000:03:00", code=13, text="0002 00000000")),
    ("NVRM: Xid (PCI:0000:61:00): 9999, pid=1234, name=python", XidLine(pci="0000:61:00", code=9999, pid=1234)),
    ("NVRM: Xid (PCI:0000:61:00): 62", XidLine(pci="0000:61:00", code=62)),
    (
        "NVRM: Xid (PCI:0000:61:00 GPU-I:05): 45, pid=9, name=python3, Ch 00000001 caused by previous Xid 149",
        XidLine(pci="0000:61:00", code=45, pid=9, text="Ch 00000001 caused by previous Xid 149"),
    ),
    (
        "NVRM: GPU 0000:61:00.0: GPU has fallen off the bus.",
        XidLine(pci="0000:61:00", code=79, text="GPU has fallen off the bus"),
    ),
    (
        "NVRM: GPU at 0000:61:00.0 has fallen off the bus.",
        XidLine(pci="0000:61:00", code=79, text="GPU has fallen off the bus"),
    ),
    ("NVRM: fallen off the bus and is not responding", XidLine(pci="", code=79, text="GPU has fallen off the bus")),
    ("NVRM: The NVIDIA GPU 0000:b3:00.0", GpuLine(pci="0000:b3:00")),
    (
        "NVRM: GPU at PCI:0000:61:00: GPU-9bd97d4a-0a5c-4a0b-8a0e-2f0b0a0c0d0e",
        GpuLine(pci="0000:61:00", uuid="GPU-9bd97d4a-0a5c-4a0b-8a0e-2f0b0a0c0d0e"),
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        DamageLine(
            kind="nvlink_error",
            device=f"{SWITCH}/20034",
            text=f"{SWITCH} reports SXid 20034: Fatal, Link 30 LTSSM Fault Up",
        ),
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress",
        DamageLine(
            code="xid",
            device=f"{SWITCH}/12028",
            text=f"{SWITCH} reports SXid 12028: Non-fatal, Link 32 egress",
        ),
    ),
    ("nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Data {0x000001c0, 0x00bd5c8a}", None),
    ("mlx5_core 0000:5e:00.0 ens1f0np0: Link down", LinkLine(port="ens1f0np0", up=False)),
    ("mlx5_core 0000:5e:00.0 ens1f0np0: Link up", LinkLine(port="ens1f0np0", up=True)),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN", LinkLine(port="mlx5_5/1", up=False)),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link INIT", None),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE", LinkLine(port="mlx5_5/1", up=True)),
    ("igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down", LinkLine(port="eno1", up=False)),
    ("ixgbe 0000:01:00.0 eth0: NIC Link is Up 10 Gbps, Flow Control: None", LinkLine(port="eth0", up=True)),
    ("bond0: (slave eth2): link status definitely down, disabling slave", LinkLine(port="eth2", up=False)),
    ("ata1: SATA link down (SStatus 0 SControl 300)", None),
    ("IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready", None),
    ("Out of memory: Killed process 4321 (python) total-vm:1kB", OomLine(pid=4321, name="python", cgroup=False)),
    (
        "Memory cgroup out of memory: Killed process 17 (pt_data_worker) total",
        OomLine(pid=17, name="pt_data_worker", cgroup=True),
    ),
    ("Out of memory: Kill process 12 (a (b) score 9 or sacrifice child", OomLine(pid=12, name="a (b", cgroup=False)),
    (
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
        DamageLine(kind="ecc_error", device="MC0", text="EDAC MC0: 1 UE memory read error on CPU_SrcID#0"),
    ),
    ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", None),
    (
        "Memory failure: 0x12345: Sending SIGBUS to python:1234 due to hardware memory corruption",
        DamageLine(
            kind="ecc_error",
            device="memory",
            text="Memory failure: 0x12345: Sending SIGBUS to python:1234 due to hardware memory corruption",
        ),
    ),
    (
        "NVRM: GPU 0000:61:00.0: Failed to create a DMA mapping!",
        DamageLine(
            kind="invalid_dma_mapping",
            device="0000:61:00",
            text="GPU 0000:61:00.0: Failed to create a DMA mapping!",
        ),
    ),
    (
        "I/O error, dev nvme0n1, sector 123 op 0x0:(READ)",
        DamageLine(code="disk_error", device="nvme0n1", text="I/O error, dev nvme0n1, sector 123 op 0x0:(READ)"),
    ),
    (
        "EXT4-fs error (device nvme1n1p1): ext4_find_entry:1455: inode #2",
        DamageLine(
            code="disk_error",
            device="nvme1n1p1",
            text="EXT4-fs error (device nvme1n1p1): ext4_find_entry:1455: inode #2",
        ),
    ),
    (
        "nvme nvme0: I/O 123 QID 4 timeout, aborting",
        DamageLine(code="disk_error", device="nvme0", text="nvme nvme0: I/O 123 QID 4 timeout, aborting"),
    ),
    ("EXT4-fs (vda): mounted filesystem r/w without journal. Quota mode: none.", None),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01", None),
    ("random: crng reseeded", None),
]


def without_stamp(said: Said | None) -> Said | None:
    return XidLine(pci=said.pci, code=said.code, text=said.text, pid=said.pid) if isinstance(said, XidLine) else said


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("line", "said"), LINES)
def test_lines(prefix: str, line: str, said: Said | None) -> None:
    assert without_stamp(parse((prefix + line).encode())) == said


def test_what_stands_before_an_xid_tells_one_occurrence_from_another() -> None:
    stamps = [parse(f"{prefix}{FALLEN}").stamp for prefix in PREFIXES[1:]]
    assert stamps == [prefix.strip() for prefix in PREFIXES[1:]]


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from([line for line, _ in LINES]))
def test_any_bytes_are_taken(before: bytes, after: bytes, line: str) -> None:
    parse(before)
    parse(before + line.encode() + after)


@given(
    st.lists(
        st.sampled_from(
            ["NVRM: ", "Xid (", "PCI:0000:61:00", "): ", "79", ", ", "fallen off the bus", "XFS (", " error", "\x00", "é"]
        )
    )
)
def test_any_scraps_of_lines_are_taken(scraps: list[str]) -> None:
    parse("".join(scraps))


@pytest.mark.parametrize(
    "scrap", ["NVRM: ", "NVRM: GPU at ", "XFS (a): ", "SXid (", "x 0000:00:00.0 ", "EDAC x: 1 UE", "Buffer I/O error on dev "]
)
def test_huge_lines_cost_little(scrap: str) -> None:
    """Only the beginning is looked at: nothing that is repeated makes a pattern try for ever."""
    tail = "Xid (fallen off the bus DMA mapping Link Killed process EDAC EXT4-fs error XFS ( nvme nvme hardware memory"
    for filling in (scrap, scrap + tail):
        parse(filling.encode() * (1_000_000 // len(filling)))


def test_a_line_that_is_cut_still_tells_what_its_beginning_says() -> None:
    said = parse(FALLEN.encode() + b"\xff\x00" * 10_000_000)
    assert isinstance(said, XidLine)
    assert said.code == 79


# --- links -----------------------------------------------------------------------------------------------------------


def links(story: list[tuple[float, str, bool]], *, until: float) -> list[Finding]:
    watch, found = LinkWatch(), list[Finding]()
    for now, port, up in story:
        found += [*watch.due(now), *watch.hear(port, now, up=up)]
    return [*found, *watch.due(until)]


def test_a_short_interruption_is_a_notice_that_ends() -> None:
    found = links([(0.0, "ib0", False), (3.0, "ib0", True)], until=60.0)
    assert found == [
        HardwareNotice(code="link_down", text="the link of port ib0 is down"),
        HardwareNotice(code="link_down", text="the link of port ib0 is up again after 3.0 s", active=False),
    ]


def test_a_link_that_stays_down_is_a_fault() -> None:
    watch = LinkWatch()
    assert len([*watch.hear("ib0", 0.0, up=False)]) == 1
    assert not [*watch.due(10.0)]
    (fault,) = watch.due(10.5)
    assert isinstance(fault, HardwareFault)
    assert (fault.kind, fault.gpu) == ("link_flapping", None)
    assert fault.evidence == "the link of port ib0 is down for 10.5 s (limit: 10 s)"
    assert not [*watch.due(20.0)]
    (over,) = watch.hear("ib0", 60.0, up=True)
    assert over == HardwareNotice(code="link_down", text="the link of port ib0 is up again after 60.0 s", active=False)


def test_a_link_that_goes_down_three_times_in_ten_minutes_flaps() -> None:
    story = [(at + wait, "ib0", wait > 0) for at in range(0, 10_000, 100) for wait in (0.0, 2.0)]
    found = links(story, until=9902.0 + 700.0)
    faults = [one for one in found if isinstance(one, HardwareFault)]
    assert [one.evidence for one in faults] == ["the link of port ib0 went down 3 times within 600 s (limit: 3)"]
    assert len(found) == 7, "three downs, two ups, the fault, and that it is over"
    assert found[-1] == HardwareNotice(code="link_down", text="the link of port ib0 has been up for 700 s", active=False)


def test_three_times_in_more_than_ten_minutes_is_not_flapping() -> None:
    story = [(at + wait, "ib0", wait > 0) for at in (0.0, 400.0, 800.0) for wait in (0.0, 2.0)]
    assert not [one for one in links(story, until=900.0) if isinstance(one, HardwareFault)]


def test_one_of_two_ports_that_are_down_comes_back() -> None:
    found = links([(0.0, "a", False), (1.0, "b", False), (2.0, "a", True)], until=2.0)
    assert found[-1] == HardwareNotice(
        code="link_down", text="the link of port a is up again after 2.0 s; not so b", active=True
    )


def test_made_up_ports_do_not_fill_the_memory() -> None:
    watch = LinkWatch(LinkRules())
    for number in range(5 * MAX_PORTS):
        assert [*watch.hear(f"port{number}", 0.0, up=False)]
    assert len(watch._ports) == MAX_PORTS


# --- other damage ----------------------------------------------------------------------------------------------------


def test_damage_is_told_once_until_it_was_silent() -> None:
    watch = KernelWatch(num_gpus=2)
    watch.learn([GpuName(index=1, uuid="GPU-1", pci="0000:61:00")])
    line = parse("NVRM: GPU 0000:61:00.0: Failed to create a DMA mapping!")
    assert line is not None
    (fault,) = watch.hear(line, 0.0)
    assert isinstance(fault, HardwareFault)
    assert (fault.kind, fault.gpu, fault.uuid) == ("invalid_dma_mapping", 1, "GPU-1")
    assert not [*watch.hear(line, 100.0)]
    assert not [*watch.hear(line, 200.0)]
    assert [*watch.hear(line, 400.0)]


def test_a_disk_error_is_a_notice() -> None:
    watch = KernelWatch(num_gpus=2)
    (notice,) = watch.hear(parse("I/O error, dev nvme0n1, sector 1"), 0.0)
    assert notice == HardwareNotice(code="disk_error", text="I/O error, dev nvme0n1, sector 1")


def test_a_notice_ends_when_nothing_more_of_it_came_for_the_window() -> None:
    watch = KernelWatch(num_gpus=2)
    assert [*watch.hear(parse("I/O error, dev nvme0n1, sector 1"), 0.0)]
    (second,) = watch.hear(parse("I/O error, dev sda, sector 1"), 100.0)
    assert second.text == "I/O error, dev sda, sector 1; besides nvme0n1", "the note of a node says all that holds"
    assert not [*watch.hear(parse("I/O error, dev sda, sector 2"), 200.0)]
    assert not [*watch.due(379.0)]
    (over,) = watch.due(380.0)
    assert (over.code, over.active) == ("disk_error", False)
    assert not [*watch.due(1000.0)]


def test_xids_of_several_gpus_are_one_note_that_ends() -> None:
    watch = KernelWatch(num_gpus=8)
    watch.learn(imagined_gpus(8))
    for gpu in (1, 2):
        assert not [*watch.hear_xid(GpuName(index=gpu), 9999, 0.0)]
    first, second = watch.due(60.0)
    assert (first.code, first.active, "besides" in first.text) == ("xid", True, False)
    assert second.text.endswith("besides Xid 9999 of GPU 1")
    (over,) = watch.due(180.0)
    assert (over.code, over.active) == ("xid", False)
    assert not [*watch.due(10_000.0)]


def test_a_gpu_that_is_lost_without_an_xid_is_the_one_named_before() -> None:
    watch = KernelWatch(num_gpus=8)
    watch.learn(imagined_gpus(8))
    lines = ["NVRM: The NVIDIA GPU 0000:04:00.0", "NVRM: (PCI ID: 10de:26b5) installed", "NVRM: fallen off the bus and is not"]
    (fault,) = [found for line in lines if (said := parse(line)) for found in watch.hear(said, 0.0)]
    assert isinstance(fault, HardwareFault)
    assert (fault.kind, fault.gpu) == ("gpu_lost", 3)


# --- following -------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=50)), st.integers(1, 20))
def test_lines_are_whole_however_they_come(lines: list[bytes], size: int) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    data = b"".join(line + b"\n" for line in lines)
    splitter = LineSplitter()
    found = [line for start in range(0, len(data), size) for line in splitter.split(data[start : start + size])]
    assert found == lines


def test_a_line_without_end_is_not_kept() -> None:
    splitter = LineSplitter()
    for _ in range(1000):
        assert splitter.split(b"x" * 65536) == []
    assert len(splitter._rest) <= LINE_LIMIT_BYTES
    assert splitter.split(b"\nnext\n") == [b"x" * LINE_LIMIT_BYTES, b"next"]


class Following:
    """`follow` in a thread, as the agent has it."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.lines: list[bytes] = []
        self.error: OSError | None = None
        self._news = threading.Condition()
        self._opened, self._stop = threading.Event(), threading.Event()
        self._path, self._from_start = path, from_start
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        try:
            for lines in follow(self._path, self._stop.wait, self._opened.set, from_start=self._from_start):
                with self._news:
                    self.lines += lines
                    self._news.notify()
        except OSError as error:
            self.error = error
            self._opened.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._opened.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def until(self, *lines: bytes) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.lines == list(lines), DEADLINE_S), self.lines


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_file_is_followed_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    append(path, "old\n")
    with Following(path) as following:
        append(path, "new\nunfin")
        following.until(b"new")
        append(path, "ished\n")
        following.until(b"new", b"unfinished")


def test_a_file_is_followed_through_rotation(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    append(path, "old\n")
    with Following(path) as following:
        with path.open("a") as writer:
            path.rename(tmp_path / "kern.log.1")
            writer.write("last words\n")
        append(path, "first words\n")
        following.until(b"last words", b"first words")
        path.unlink()
        append(path, "again\n")
        following.until(b"last words", b"first words", b"again")


def test_a_file_that_is_emptied_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    append(path, "a long old line\n")
    with Following(path) as following:
        os.truncate(path, 0)
        append(path, "new\n")
        following.until(b"new")


def test_a_file_that_is_new_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    append(path, "first\n")
    with Following(path, from_start=True) as following:
        following.until(b"first")


def test_a_fifo_outlives_its_writers(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with Following(path) as following:
        for word in ("one", "two"):
            path.write_text(f"{word}\n")
        following.until(b"one", b"two")


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with Following(tmp_path / "nothing") as following:
        assert isinstance(following.error, FileNotFoundError)


# --- the agent's part ------------------------------------------------------------------------------------------------


class Told:
    """Collects what is told, and the processes that were killed for memory."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[GpuFault | NodeNotice] = asyncio.Queue()
        self.killed: list[int] = []
        self.life = "first"

    async def next(self) -> GpuFault | NodeNotice:
        async with asyncio.timeout(DEADLINE_S):
            return await self.queue.get()


def kernel_log(told: Told, source: Path | None, root: Path) -> KernelLog:
    return KernelLog(
        source=source,
        num_gpus=4,
        jobs=lambda: ("a",),
        life=lambda: told.life,
        tell=told.queue.put_nowait,
        oom=told.killed.append,
        root=root,
    )


@asynccontextmanager
async def listening(source: Path | None, root: Path) -> AsyncIterator[tuple[KernelLog, Told]]:
    told = Told()
    log = kernel_log(told, source, root)
    running = asyncio.create_task(log.run())
    try:
        yield log, told
    finally:
        running.cancel()
        await asyncio.wait([running])
        await eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "kernel-log"])


async def eventually(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():  # noqa: ASYNC110 - threads and log files ring no bell
            await asyncio.sleep(0.01)


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A root directory with the files of a driver that has two GPUs."""
    for address, uuid in (("0000:61:00.0", "GPU-11111111-aaaa"), ("0000:C1:00.0", "GPU-22222222-bbbb")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t 0\n")
    return tmp_path


def test_the_drivers_files_name_the_gpus(driver: Path, tmp_path: Path) -> None:
    assert listed_gpus(driver) == (
        GpuName(index=0, uuid="GPU-11111111-aaaa", pci="0000:61:00"),
        GpuName(index=1, uuid="GPU-22222222-bbbb", pci="0000:c1:00"),
    )
    assert has_driver(driver)
    assert listed_gpus(tmp_path / "nowhere") == ()
    assert not has_driver(tmp_path / "nowhere")


async def test_faults_arrive_with_the_names_of_the_gpu_and_the_jobs(driver: Path) -> None:
    fifo = driver / "kmsg"
    os.mkfifo(fifo)
    async with listening(fifo, driver) as (_, told):
        await asyncio.to_thread(fifo.write_text, "noise\n4,1,1,-;NVRM: Xid (PCI:0000:C1:00): 79, pid=1, name=x, gone\n")
        fault = await told.next()
        assert isinstance(fault, GpuFault)
        assert (fault.kind, fault.gpu, fault.uuid, fault.jobs) == ("gpu_lost", 1, "GPU-22222222-bbbb", ("a",))
        assert (fault.xid, fault.count, fault.symptom) == (79, 1, False)


async def test_an_event_and_a_line_of_the_same_xid_are_one(driver: Path) -> None:
    """PB06: the driver tells by both ways."""
    async with listening(None, driver) as (log, told):
        log.on_xid(1, "GPU-22222222-bbbb", 79)
        log.inject("NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.")
        log.inject("NVRM: Xid (PCI:0000:61:00): 48, pid=1, name=x, DBE")
        assert [(await told.next()).xid for _ in range(2)] == [79, 48]
        assert told.queue.empty()


async def test_a_flood_of_symptoms_is_one_observation(driver: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PB10: 12,000 lines of Xid 45, as seen on one node."""
    source = driver / "kern.log"
    source.touch()
    caplog.set_level("INFO")
    async with listening(source, driver) as (_, told):
        await eventually(lambda: "following" in caplog.text)
        append(source, "NVRM: Xid (PCI:0000:61:00): 45, pid=1, name=python, Ch 00000001\n" * 12_000)
        fault = await told.next()
        assert isinstance(fault, GpuFault)
        assert (fault.xid, fault.symptom, fault.gpu) == (45, True, 0)
        assert fault.count > 1
        assert told.queue.empty()


async def test_lines_can_be_injected_into_a_node_without_gpus(tmp_path: Path) -> None:
    async with listening(None, tmp_path) as (log, told):
        assert log.address_of(3) == "0000:04:00"
        assert log.address_of(7) == ""
        log.inject(f"NVRM: Xid (PCI:{log.address_of(3)}): 119, Timeout waiting for RPC from GSP!")
        fault = await told.next()
        assert isinstance(fault, GpuFault)
        assert (fault.kind, fault.gpu) == ("gpu_driver_error", 3)


async def test_processes_killed_for_memory_are_passed_on(tmp_path: Path) -> None:
    async with listening(None, tmp_path) as (log, told):
        log.inject("6,1,1,-;Memory cgroup out of memory: Killed process 4321 (python) total-vm:1kB")
        assert told.killed == [4321]
        assert told.queue.empty()


async def test_a_log_that_cannot_be_read_is_a_notice_where_there_is_a_driver(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unicron_lib.agent.kernel_log.RETRY_S", 0.01)
    source = driver / "kern.log"
    async with listening(source, driver) as (_, told):
        blind = await told.next()
        assert isinstance(blind, NodeNotice)
        assert (blind.code, blind.active) == ("kernel_log_blind", True)
        assert "No such file" in blind.text
        told.life = "second"
        assert await told.next() == blind, "a new life tells it again"
        source.write_text("NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus.\n")
        seeing, fault = await told.next(), await told.next()
        assert isinstance(seeing, NodeNotice)
        assert (seeing.code, seeing.active) == ("kernel_log_blind", False)
        assert isinstance(fault, GpuFault)


async def test_without_a_driver_a_log_that_cannot_be_read_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fails(path: Path, *_: object, **__: object) -> Iterator[list[bytes]]:
        attempts.append(path)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("unicron_lib.agent.kernel_log.RETRY_S", 0.01)
    monkeypatch.setattr("unicron_lib.agent.kernel_log.follow", fails)
    async with listening(tmp_path / "kmsg", tmp_path) as (_, told):
        await eventually(lambda: len(attempts) > 3)
    assert caplog.text.count("Operation not permitted") == 1
    assert told.queue.empty()


async def test_a_new_life_tells_its_faults_again(tmp_path: Path) -> None:
    """The old life may have ended before what it said was heard; echoes and notices are not worth it."""
    async with listening(None, tmp_path) as (log, told):
        log.inject("NVRM: Xid (PCI:0000:01:00): 48, pid=1, name=x, DBE")
        log.inject("NVRM: Xid (PCI:0000:01:00): 45, pid=1, name=x, Ch 1")
        log.inject("NVRM: Xid (PCI:0000:01:00): 63, pid=1, name=x, row")
        first = await told.next()
        assert {await told.next() != first for _ in range(2)} == {True}
        told.life = "second"
        assert await told.next() == first
    assert told.queue.empty()


async def test_a_failure_to_tell_does_not_end_the_listening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    full = [OSError("no space left"), None]

    def tell(body: GpuFault | NodeNotice) -> None:
        if error := full.pop(0):
            raise error
        told.queue.put_nowait(body)

    log = kernel_log(told, None, tmp_path)
    log._tell = tell
    running = asyncio.create_task(log.run())
    log.inject("NVRM: Xid (PCI:0000:01:00): 45, pid=1, name=x, Ch 1")
    await eventually(lambda: "could not be told" in caplog.text)
    log.inject("NVRM: Xid (PCI:0000:01:00): 46, pid=1, name=x, timeout")
    assert (await told.next()).xid == 46
    running.cancel()
    await asyncio.wait([running])


def test_records_that_were_overwritten_before_they_were_read_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the gap in the kernel's buffer is read; a device's properties after its text are not."""
    answers: list[OSError | bytes] = [
        b"4,1,1,-;one\n SUBSYSTEM=pci\n",
        OSError(errno.EPIPE, "Broken pipe"),
        b"4,9,9,-;two\n",
        BlockingIOError(),
        OSError(errno.EIO, "Input/output error"),
    ]

    def read(*_: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("unicron_lib.agent.log_source.os.read", read)
    assert _records(3) == [b"4,1,1,-;one", b"4,9,9,-;two"]
    with pytest.raises(OSError, match="Input/output error"):
        _records(3)


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log cannot be read here")
def test_the_kernels_device_is_followed_from_its_end() -> None:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except PermissionError:
        pytest.skip("the kernel's log cannot be read here")
    with Following(Path("/dev/kmsg")) as following:
        assert following.error is None
    assert len(following.lines) < 10, "nothing of what was there before"


# --- out of memory ---------------------------------------------------------------------------------------------------


def test_a_process_that_the_kernel_named_was_killed_for_memory(tmp_path: Path) -> None:
    now = [0.0]
    watch = OomWatch(tmp_path, clock=lambda: now[0])
    watch.name(17)
    assert watch.struck(17)
    assert not watch.struck(18)
    assert not watch.struck()
    now[0] = 3600.0
    assert not watch.struck(17), "the process id is another one's by now"


def test_each_kill_that_is_counted_explains_one_end(tmp_path: Path) -> None:
    events = tmp_path / "sys/fs/cgroup/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("oom_kill 4\n")
    now = [0.0]
    watch = OomWatch(tmp_path, clock=lambda: now[0])
    events.write_text("oom_kill 6\n")
    assert [watch.struck(pid) for pid in (1, 2, 3)] == [True, True, False]
    events.write_text("oom_kill 7\n")
    watch.look()
    now[0] = 4.0
    assert watch.struck(4)
    events.write_text("oom_kill 8\n")
    watch.look()
    now[0] = 86_400.0
    assert not watch.struck(5), "what was killed yesterday was no rank"
