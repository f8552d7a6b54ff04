"""Acme's Table 3: its rows are kept as they were told, and agree with each other where they have to."""

import pytest

from unicron_lib.simulation.acme_table import ACME, acme


def test_what_the_rows_say_of_each_other() -> None:
    """Shares from the rows' own means come near those published, for the causes that took most of the time."""
    rows = {row[0]: row for row in acme().rows}
    assert len(rows) == len(ACME)
    for cause in ("NVLink error", "CUDA error", "node failure", "ECC error", "network error"):
        _, _, published, computed, *_ = rows[cause]
        assert computed == pytest.approx(published, rel=0.16)
    assert sum(row[3] for row in rows.values()) == pytest.approx(sum(row.share for row in ACME.values()))


def test_infrastructure_takes_most_of_the_failed_time() -> None:
    framework = {"dataloader killed", "out of memory", "runtime error", "assertion error"}
    of_infrastructure = [row for cause, row in ACME.items() if cause not in framework]
    assert sum(row.num for row in of_infrastructure) == 281
    assert sum(row.share for row in of_infrastructure) == pytest.approx(82.06)


def test_where_a_time_was_not_told_there_is_no_sigma() -> None:
    rows = {row[0]: row for row in acme().rows}
    assert rows["NCCL remote error"][-1] is None
    assert rows["connection error"][-1] is None, "its median is 0"
    assert rows["NVLink error"][-2:] == (pytest.approx(1.86, abs=0.01), pytest.approx(3.51, abs=0.01))
