"""The table of Xids, and which of them are told as what."""

import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.detection.findings import Finding, HardwareFault, HardwareNotice
from unicron_lib.detection.gpu_names import GpuName, GpuNames, pci_address
from unicron_lib.detection.kernel_log import XidLine
from unicron_lib.detection.kernel_watch import KernelWatch
from unicron_lib.detection.xid import MAX_SIGHTINGS, XidRules, XidWatch, explain
from unicron_lib.detection.xid_table import XIDS, Action, Role
from unicron_lib.domain.failures import ErrorKind

GPUS = tuple(GpuName(index=index, uuid=f"GPU-{index}", pci=f"0000:{index + 1:02x}:00") for index in range(8))
NVLINK_5 = tuple(range(144, 151))
RULES = XidRules()


def told(watch: XidWatch, xids: Iterable[tuple[float, int, int]], *, until: float | None = None) -> list[Finding]:
    """What is told of (time, GPU, code), asked for what is due at each of them and long after the last one."""
    found: list[Finding] = []
    now = 0.0
    for now, gpu, code in xids:
        found += watch.due(now)
        found += watch.hear(GPUS[gpu], code, now)
    return [*found, *watch.due(now + 60 if until is None else until)]


def faults(found: Iterable[Finding], *, symptom: bool = False) -> list[HardwareFault]:
    return [one for one in found if isinstance(one, HardwareFault) and one.symptom == symptom]


def test_the_table_has_each_code_of_the_catalog() -> None:
    assert sorted(XIDS) == list(range(1, 173))


@pytest.mark.parametrize("code", XIDS)
def test_each_entry_is_whole(code: int) -> None:
    xid = XIDS[code]
    assert xid.code == code
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+", xid.mnemonic)
    assert 5 <= len(xid.meaning) <= 80
    assert (xid.kind is None) == (xid.role is Role.NOTICE)
    if xid.kind:
        assert ErrorKind(xid.kind)
    if xid.action in {Action.RESET_GPU, Action.REBOOT, Action.RESTART_VM}:
        assert xid.role in {Role.CAUSE, Role.SYMPTOM}, "whoever must reset something is told"
    if xid.action is Action.NONE and code not in {43, 137}:
        assert xid.role is Role.NOTICE, "what asks for nothing takes no GPU away"


@pytest.mark.parametrize(
    ("code", "role", "kind"),
    [
        (13, Role.APPLICATION, "illegal_memory_access"),
        (31, Role.APPLICATION, "illegal_memory_access"),
        (43, Role.APPLICATION, "illegal_memory_access"),
        (45, Role.SYMPTOM, "cuda_error"),
        (48, Role.CAUSE, "ecc_error"),
        (62, Role.CAUSE, "gpu_driver_error"),
        (63, Role.NOTICE, None),
        (64, Role.CAUSE, "ecc_error"),
        (74, Role.CAUSE, "nvlink_error"),
        (79, Role.CAUSE, "gpu_lost"),
        (92, Role.NOTICE, None),
        (94, Role.CAUSE, "ecc_error"),
        (95, Role.CAUSE, "ecc_error"),
        (109, Role.CAUSE, "gpu_driver_error"),
        (119, Role.CAUSE, "gpu_driver_error"),
        (120, Role.CAUSE, "gpu_driver_error"),
        (140, Role.CAUSE, "ecc_error"),
        (154, Role.NOTICE, None),
        (9999, Role.NOTICE, None),
    ],
)
def test_what_the_well_known_ones_mean(code: int, role: Role, kind: str | None) -> None:
    xid = explain(code)
    assert (xid.role, xid.kind) == (role, kind)


@pytest.mark.parametrize("code", NVLINK_5)
def test_the_newer_nvlink_errors_say_themselves_whether_they_are_fatal(code: int) -> None:
    registers = "(0x026001c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
    assert explain(code, f"NETIR_LINK_EVT Fatal XC0 i0 Link 00 {registers}").role is Role.CAUSE
    assert explain(code, f"SAW_MVB Nonfatal XC0 i0 Link 0 {registers}").role is Role.NOTICE
    assert explain(code).role is Role.SYMPTOM, "an event without a text takes no GPU away"


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", Role.CAUSE),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Role.CAUSE),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", Role.NOTICE),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", Role.NOTICE),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", Role.NOTICE),
        ("GPU recovery action changed from 0x0 (None) to 0x2a (Polish)", Role.NOTICE),
    ],
)
def test_a_changed_recovery_action_counts_for_what_it_changes_to(text: str, role: Role) -> None:
    assert explain(154, text).role is role


@pytest.mark.parametrize(
    ("registers", "role"),
    [
        ("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Role.CAUSE),
        ("0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Role.NOTICE),
        ("0x40800001, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", Role.NOTICE),
        ("0x100002, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", Role.SYMPTOM),
        ("0x0, 0x0, 0x0, 0x10000, 0x0, 0x0, 0x0", Role.SYMPTOM),
        ("0x100012, 0x0, 0x0, 0x10000, 0x0, 0x0, 0x0", Role.CAUSE),
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", Role.CAUSE),
    ],
)
def test_the_registers_of_an_nvlink_error_tell_harmless_ones(registers: str, role: Role) -> None:
    assert explain(74, f"NVLink: fatal error detected on link 14({registers})").role is role


@given(st.integers(min_value=0, max_value=10**9 - 1), st.text(max_size=200))
def test_any_code_with_any_text_is_told_once_with_its_number(code: int, text: str) -> None:
    """PB09: an Xid that no table knows is neither dropped nor a crash."""
    watch = XidWatch()
    found = [*watch.hear(GPUS[0], code, 0.0, text=text), *watch.due(60.0)]
    assert len(found) == 1
    words = found[0].text if isinstance(found[0], HardwareNotice) else found[0].evidence
    assert f"Xid {code}" in words


def test_an_unknown_code_asks_for_what_is_configured() -> None:
    """PB09: 62 is known and a fault, 9999 is a notice with its number."""
    watch = XidWatch(XidRules(unknown_action=Action.CHECK_MECHANICALS))
    known, unknown = told(watch, [(0.0, 0, 62), (0.1, 0, 9999)])
    assert isinstance(known, HardwareFault)
    assert (known.kind, known.xid, known.gpu) == ("gpu_driver_error", 62, 0)
    assert isinstance(unknown, HardwareNotice)
    assert unknown.code == "xid"
    assert "Xid 9999" in unknown.text
    assert "check seating" in unknown.text


def test_a_cause_is_told_at_once_and_then_only_after_a_long_silence() -> None:
    watch = XidWatch()
    (fault,) = watch.hear(GPUS[3], 79, 0.0, text="GPU has fallen off the bus.")
    assert isinstance(fault, HardwareFault)
    assert (fault.kind, fault.gpu, fault.uuid, fault.xid, fault.symptom) == ("gpu_lost", 3, "GPU-3", 79, False)
    assert "GPU 3 (GPU-3) reports Xid 79" in fault.evidence
    assert "restart the node" in fault.evidence
    for now in range(10, 3600, 170):
        assert not [*watch.hear(GPUS[3], 79, now), *watch.due(now + 60)]
    assert [*watch.hear(GPUS[3], 79, 3600 + RULES.window_s)]


def test_a_storm_of_symptoms_is_one_with_its_count() -> None:
    """PB10: 200 lines of Xid 45 within two seconds, and a cause among them that does not wait for them."""
    watch = XidWatch()
    storm = [(0.1 + 1.9 * number / 200, 1, 45) for number in range(200)]
    found = told(watch, [(0.0, 2, 79), *storm])
    (cause,) = faults(found)
    (symptom,) = faults(found, symptom=True)
    assert found[0] is cause
    assert (symptom.gpu, symptom.xid, symptom.count) == (1, 45, 200)
    assert "200 times" in symptom.evidence
    assert not told(watch, [(10.0 + number / 100, 1, 45) for number in range(200)])


def test_a_storm_without_end_is_told_while_it_lasts() -> None:
    watch = XidWatch()
    endless = told(watch, [(number / 100, 1, 45) for number in range(1000)], until=10.0)
    assert [one.count for one in faults(endless, symptom=True)] == [300]


def test_the_same_event_told_again_and_again_is_one() -> None:
    """PB06: one Xid 31, seen with the same time stamp in each of 30 looks that are further apart than the window."""
    watch = XidWatch()
    found = [
        one
        for look in range(30)
        for one in (*watch.hear(GPUS[0], 31, look * 400.0, stamp="4,1234,567890,-"), *watch.due(look * 400.0 + 60))
    ]
    assert [(one.xid, one.symptom) for one in found if isinstance(one, HardwareFault)] == [(31, True)]
    assert len(found) == 1


def test_the_log_and_an_event_of_the_driver_are_one_witness() -> None:
    """PB06: the same Xid by both ways, in both orders."""
    for event_first in (True, False):
        watch = KernelWatch(num_gpus=8)
        watch.learn(GPUS)
        event = lambda w=watch: w.hear_xid(GpuName(index=2, uuid="GPU-2"), 79, 0.0)  # noqa: E731
        line = lambda w=watch: w.hear(XidLine(pci="0000:03:00", code=79), 0.0)  # noqa: E731
        found = [one for tell in ((event, line) if event_first else (line, event)) for one in tell()]
        assert [(one.kind, one.gpu, one.uuid) for one in faults(found)] == [("gpu_lost", 2, "GPU-2")]


@pytest.mark.parametrize("code", [13, 31, 43])
def test_an_illegal_access_on_several_gpus_is_the_programs(code: int) -> None:
    """PB11, run 1: once on four GPUs within ten seconds."""
    found = told(XidWatch(), [(gpu * 3.0, gpu, code) for gpu in range(4)])
    assert len(faults(found, symptom=True)) == 4
    assert not faults(found)


@pytest.mark.parametrize("code", [13, 31, 43])
def test_an_illegal_access_that_repeats_on_one_gpu_is_the_gpus(code: int) -> None:
    """PB11, run 2: three times within an hour on the same GPU; the rule is in the evidence."""
    found = told(XidWatch(), [(0.0, 5, code), (1200.0, 5, code), (3500.0, 5, code)])
    (fault,) = faults(found)
    assert (fault.kind, fault.gpu, fault.uuid) == ("illegal_memory_access", 5, "GPU-5")
    assert "3 times within 3600 s on this GPU only (limit: 3)" in fault.evidence
    assert len(faults(found, symptom=True)) == 2


def test_the_limits_are_parameters_and_in_the_evidence() -> None:
    rules = XidRules(repeats=2, repeat_window_s=60.0)
    (fault,) = faults(told(XidWatch(rules), [(0.0, 5, 31), (59.0, 5, 31)]))
    assert "2 times within 60 s on this GPU only (limit: 2)" in fault.evidence
    assert not faults(told(XidWatch(rules), [(0.0, 5, 31), (61.0, 5, 31)]))


@pytest.mark.parametrize("wrong", [{"repeats": 1}, {"repeat_window_s": 0.0}, {"repeat_window_s": float("nan")}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="repeat"):
        XidRules(**wrong)


def test_many_lines_of_one_crash_are_one_occurrence() -> None:
    assert not faults(told(XidWatch(), [(number / 10, 5, 13) for number in range(50)]))


def test_three_times_in_more_than_an_hour_is_not_repeating() -> None:
    assert not faults(told(XidWatch(), [(0.0, 5, 31), (1900.0, 5, 31), (3700.0, 5, 31)]))


def test_a_mistake_that_every_gpu_repeats_is_the_programs() -> None:
    crashes = [(60.0 * crash + gpu / 10, gpu, 31) for crash in range(5) for gpu in range(8)]
    assert not faults(told(XidWatch(), crashes))


def test_a_graver_text_of_the_same_code_is_news() -> None:
    """NVML tells the code only; the log tells a moment later that it is fatal."""
    watch = XidWatch()
    assert not [*watch.hear(GPUS[0], 149, 0.0)]
    (fault,) = watch.hear(GPUS[0], 149, 0.1, text="NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x0)")
    assert isinstance(fault, HardwareFault)
    assert (fault.kind, fault.symptom) == ("nvlink_error", False)
    assert not [*watch.due(60.0)]


def test_an_old_text_says_nothing_of_a_new_event() -> None:
    watch = XidWatch()
    assert [*watch.hear(GPUS[0], 154, 0.0, text="GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")]
    found = [*watch.hear(GPUS[0], 154, 4000.0), *watch.due(4060.0)]
    assert [type(one) for one in found] == [HardwareNotice]


def test_gpus_that_the_node_does_not_offer_are_not_its_business() -> None:
    watch = KernelWatch(num_gpus=2)
    watch.learn(GPUS)
    assert not [*watch.hear_xid(GPUS[2], 79, 0.0)]
    assert [*watch.hear_xid(GPUS[1], 79, 0.0)]


@given(
    st.lists(
        st.tuples(st.floats(0, 500), st.integers(0, 7), st.sampled_from([13, 31, 43, 45, 48, 63, 74, 79, 94, 149, 9999])),
        max_size=60,
    )
)
def test_whatever_happens_causes_are_told_once_and_only_causes_are_faults(steps: list[tuple[float, int, int]]) -> None:
    now, story = 0.0, []
    for pause, gpu, code in steps:
        now += pause
        story.append((now, gpu, code))
    found = told(XidWatch(), story)
    causes = {(gpu, code) for _, gpu, code in story if XIDS.get(code) and XIDS[code].role is Role.CAUSE}
    grave = [(one.gpu, one.xid) for one in faults(found) if one.xid not in {13, 31, 43}]
    assert set(grave) == causes
    heard = {(gpu, code) for _, gpu, code in story}
    assert {(one.gpu, one.xid) for one in found if isinstance(one, HardwareFault)} <= heard
    for one in faults(found):
        lonely = [at for at, gpu, code in story if (gpu, code) == (one.gpu, one.xid)]
        silences = [later - earlier for earlier, later in pairwise(lonely)]
        assert grave.count((one.gpu, one.xid)) <= 1 + sum(silence >= RULES.window_s for silence in silences)


def test_made_up_gpus_do_not_fill_the_memory() -> None:
    watch = XidWatch()
    for number in range(5 * MAX_SIGHTINGS):
        address = f"{number:04x}:00:00"
        assert len([*watch.hear(GpuName(pci=address), 79, float(number))]) == 1
    assert sum(map(len, watch._seen.values())) <= MAX_SIGHTINGS


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("PCI:0000:61:00", "0000:61:00"),
        ("0000:61:00.0", "0000:61:00"),
        ("00000000:C1:00.0", "0000:c1:00"),
        ("PCI:0000:61:00 GPU-I:05", "0000:61:00"),
        ("nowhere", ""),
        ("", ""),
    ],
)
def test_addresses_have_one_spelling(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_the_newest_word_on_a_name_counts() -> None:
    names = GpuNames()
    names.learn(GpuName(index=0, uuid="GPU-a", pci="0000:01:00"))
    names.learn(GpuName(index=1, uuid="GPU-a"))
    assert names.complete(GpuName(pci="0000:01:00")) == GpuName(index=1, uuid="GPU-a", pci="0000:01:00")
    names.learn(GpuName(uuid="GPU-b", pci="0000:01:00"))
    assert names.complete(GpuName(pci="0000:01:00")).uuid == "GPU-b", "the card was replaced"
    assert str(GpuName()) == "a GPU"
