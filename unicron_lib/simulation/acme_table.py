"""Acme's Table 3: why jobs of its clusters failed, and when; facts of the paper, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from unicron_lib.simulation import closed_forms
from unicron_lib.simulation.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class AcmeFailures:
    """One row of Acme's Table 3: how many, their share of the failed GPU time, GPUs, and minutes to failure and to restart.

    `gpus`, `failure_min` and `restart_min` are pairs of mean and median.
    """

    num: int
    share: float
    gpus: tuple[float, float]
    failure_min: tuple[float, float]
    restart_min: tuple[float, float] | None


def _row(num: int, share: float, gpus: str, failure: str, restart: str = "") -> AcmeFailures:
    mean_of, median_of = (float(part) for part in gpus.split("/"))
    times = [tuple(float(part) for part in text.split("/")) for text in (failure, restart) if text]
    restart_min = (times[1][0], times[1][1]) if restart else None
    return AcmeFailures(
        num=num, share=share, gpus=(mean_of, median_of), failure_min=(times[0][0], times[0][1]), restart_min=restart_min
    )


ACME: Mapping[str, AcmeFailures] = MappingProxyType(
    {
        "NVLink error": _row(54, 30.25, "800/896", "868.1/155.3", "95.6/0.2"),
        "CUDA error": _row(21, 15.77, "847/1024", "923.2/586.0", "78.3/2.0"),
        "node failure": _row(16, 14.30, "712/768", "1288.8/535.8", "102.8/21.5"),
        "ECC error": _row(12, 11.00, "680/512", "1303.4/1192.3", "2.8/1.8"),
        "network error": _row(12, 4.53, "758/832", "549.6/310.1", "592.1/7.4"),
        "connection error": _row(147, 3.44, "29/1", "51.9/0.5", "0.8/0.0"),
        "S3 storage error": _row(10, 2.12, "422/256", "2317.8/202.2", "6.2/0.2"),
        "NCCL timeout": _row(6, 0.50, "596/512", "159.7/48.1", "66.7/43.6"),
        "NCCL remote error": _row(3, 0.15, "1152/1024", "50.5/22.6"),
        "dataloader killed": _row(6, 4.38, "445/508", "1580.6/961.4", "115.1/0.9"),
        "out of memory": _row(14, 3.28, "572/640", "323.8/14.5", "122.7/1.2"),
        "runtime error": _row(65, 1.72, "441/352", "66.4/3.9", "10.9/1.5"),
        "assertion error": _row(105, 1.24, "413/256", "41.7/3.0", "185.9/1.6"),
    }
)
"""The rows of Acme's Table 3 that matter; numbers and shares are quoted elsewhere too, the other cells are recalled."""


def acme() -> Table:
    """Acme's Table 3: what its rows say of each other, and the log-normal distributions of its times."""
    used = {cause: row.num * row.gpus[0] * row.failure_min[0] for cause, row in ACME.items()}
    told = sum(row.share for row in ACME.values())
    rows = []
    for cause, row in ACME.items():
        share = told * used[cause] / sum(used.values())
        restart = row.restart_min and row.restart_min[1] > 0 and closed_forms.lognormal_sigma(*row.restart_min)
        sigma = closed_forms.lognormal_sigma(*row.failure_min)
        rows.append((cause, row.num, row.share, share, *row.gpus, *row.failure_min, sigma, restart or None))
    return Table(
        name="acme",
        title="Acme's Table 3: shares of the failed GPU time, and sigma of the log-normal times",
        columns=(
            *("cause", "failures", "% of the failed GPU time, published", "from the row's own means"),
            *("GPUs, mean", "median", "mean time to failure, min", "median, min", "sigma", "sigma of the time to restart"),
        ),
        rows=tuple(rows),
        notes=(
            "From the row's own means: failures x mean GPUs x mean time, scaled to the sum of the published shares.",
            "That would be the share if how long a job runs until it fails had nothing to do with its size.",
            "sigma = sqrt(2 ln(mean / median)). Numbers and shares are quoted from a survey, the other cells are recalled.",
        ),
    )
