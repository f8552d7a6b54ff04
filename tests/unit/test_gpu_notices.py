"""What people are told of GPUs that are not broken: once, and when it is over."""

from dataclasses import replace

import pytest

from unicron_lib.detection.gpu import GpuReading
from unicron_lib.detection.gpu_notices import NoticeBoard, Sign, signs

FINE = GpuReading(
    index=0,
    uuid="GPU-0",
    temperature_c=60,
    temperature_limit_c=87,
    throttle_reasons=(),
    row_remap_pending=False,
    recovery_action=0,
)
BLIND = GpuReading(index=0, uuid="GPU-0", error_code=999)
OTHER = replace(FINE, index=1, uuid="GPU-1")


def told(*looks: GpuReading | tuple[GpuReading, ...], board: NoticeBoard | None = None, life: str = "b") -> list[list[str]]:
    """A list of notices for each look: the code, with a minus if it is over."""
    board = board or NoticeBoard()
    return [
        [("" if notice.active else "-") + notice.code for notice in board.news(signs(_gpus(look)), life=life)] for look in looks
    ]


def _gpus(look: GpuReading | tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
    return (look,) if isinstance(look, GpuReading) else look


@pytest.mark.parametrize(
    ("gpu", "code", "text"),
    [
        (
            replace(FINE, row_remap_pending=True),
            "row_remap_pending",
            "GPU 0 replaces a broken row of its memory at its next reset",
        ),
        (replace(FINE, recovery_action=2), "gpu_recovery_action", "GPU 0 needs a reboot of the node (recovery action 2)"),
        (
            replace(FINE, recovery_action=42),
            "gpu_recovery_action",
            "GPU 0 needs a recovery that this version does not know (recovery action 42)",
        ),
        (BLIND, "gpu_blind", "GPU 0 cannot be looked at (NVML error 999)"),
    ],
)
def test_what_is_told_at_once_and_when_it_is_over(gpu: GpuReading, code: str, text: str) -> None:
    board = NoticeBoard()
    (notice,) = board.news(signs([gpu]), life="b")
    assert (notice.code, notice.text, notice.active) == (code, text, True)
    assert told(gpu, board=board) == [[]]
    over = [n for _ in range(2) for n in board.news(signs([FINE]), life="b")]
    assert [(notice.code, notice.text, notice.active) for notice in over] == [(code, "it is over: GPU 0", False)]


@pytest.mark.parametrize("action", range(1, 8))
def test_every_known_recovery_action_has_a_name(action: int) -> None:
    """PB14."""
    (notice,) = NoticeBoard().news(signs([replace(FINE, recovery_action=action)]), life="b")
    assert f"(recovery action {action})" in notice.text
    assert "does not know" not in notice.text


def test_no_recovery_action_is_nothing_to_tell() -> None:
    assert told(FINE, replace(FINE, recovery_action=None)) == [[], []]


def test_another_recovery_action_is_news() -> None:
    one, two = replace(FINE, recovery_action=1), replace(FINE, recovery_action=2)
    assert told(one, one, two, FINE) == [["gpu_recovery_action"], [], ["gpu_recovery_action"], ["-gpu_recovery_action"]]


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("gpu_hot", {"temperature_c": 87}),
        ("gpu_throttled", {"throttle_reasons": ("hw_thermal_slowdown",)}),
        ("gpu_throttled", {"throttle_reasons": ("hw_power_brake_slowdown", "hw_slowdown")}),
    ],
)
def test_heat_is_told_when_it_stays_and_over_when_it_stays_away(code: str, bad: dict[str, object]) -> None:
    hot = replace(FINE, **bad)
    assert told(hot, hot, FINE, hot, hot, hot, FINE, hot, FINE, FINE, FINE) == [
        *[[]] * 5,
        [code],
        *[[]] * 4,
        [f"-{code}"],
    ]


def test_a_gpu_that_uses_the_power_it_may_is_not_throttled() -> None:
    assert told(*[replace(FINE, throttle_reasons=("sw_power_cap", "sync_boost"))] * 9) == [[]] * 9


def test_without_a_limit_no_temperature_is_too_hot() -> None:
    assert told(*[replace(FINE, temperature_c=110, temperature_limit_c=None)] * 9) == [[]] * 9


def test_what_cannot_be_read_changes_nothing() -> None:
    waiting = replace(FINE, row_remap_pending=True)
    assert told(waiting, BLIND, waiting) == [["row_remap_pending"], ["gpu_blind"], []]


def test_gpus_share_a_notice_and_it_is_over_with_the_last() -> None:
    one, two = replace(FINE, row_remap_pending=True), replace(OTHER, row_remap_pending=True)
    looks = ((one, OTHER), (one, two), (FINE, two), (one, two), (FINE, OTHER))
    assert told(*looks) == [["row_remap_pending"], ["row_remap_pending"], [], [], ["-row_remap_pending"]]


def test_a_new_life_tells_again_what_still_holds() -> None:
    board = NoticeBoard()
    waiting = replace(FINE, row_remap_pending=True)
    assert told(waiting, board=board) == [["row_remap_pending"]]
    assert told(waiting, waiting, FINE, board=board, life="c") == [["row_remap_pending"], [], ["-row_remap_pending"]]


def test_blindness_of_the_whole_is_one_notice_whatever_its_reason() -> None:
    """PB04: one warning, then one that it is over."""
    board = NoticeBoard()
    reasons = ["the driver says 999", "it does not start", "it does not start", ""]
    seen = [Sign(code="gpu_blind", who="the probe", what="cannot see" if why else "", detail=why) for why in [*reasons, ""]]
    news = [notice for sign in seen for notice in board.news([sign], life="b")]
    assert [(notice.active, notice.text) for notice in news] == [
        (True, "the probe cannot see (the driver says 999)"),
        (False, "it is over: the probe"),
    ]
