"""`unicron accounts`: what the cluster's GPU-seconds were used for, what its jobs earned, and what each incident has cost."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_lib.cli.look import print_tables, table_of
from unicron_lib.cli.options import AsJson, print_json
from unicron_lib.cli.target import find_target

if TYPE_CHECKING:
    from unicron_lib.simulation.accounting import Account, Books


def accounts(
    gpu_dollars_h: Annotated[float, typer.Option(min=0.0, help="What a GPU costs an hour, in dollars.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """The accounts of the whole journal, by the types of badput that simulated runs have, too."""
    from unicron_lib.simulation.journal_segments import of_journal

    events = (entry.event for entry in find_target().journal().entries())
    books = of_journal(events, end_s=time.time(), gpu_dollars_h=gpu_dollars_h)
    if as_json:
        print_json(_told(books))
        return
    uses = [{"use": name, "gpu_h": gpu_s / 3600.0} for name, gpu_s in _told(books)["cluster"]["gpu_s"].items()]
    print_tables(
        f"{books.dollars:.2f} dollars, goodput {books.cluster.goodput:.1%}, ETTR {books.cluster.ettr:.1%}",
        table_of("uses", uses),
        table_of("jobs", [{"job": name, **_row(account)} for name, account in books.jobs.items()]),
        table_of("incidents", [row for row in _losses(books) if row["incident"]]),
    )


def _told(books: "Books") -> dict[str, Any]:
    return {
        "cluster": {**_row(books.cluster), "gpu_s": _used(books.cluster)},
        "jobs": {name: {**_row(account), "gpu_s": _used(account)} for name, account in books.jobs.items()},
        "losses": _losses(books),
        "dollars": books.dollars,
    }


def _row(account: "Account") -> dict[str, Any]:
    return {
        "goodput": account.goodput,
        "ettr": account.ettr,
        "training_s": account.training_s,
        "elapsed_s": account.elapsed_s,
        "waf_flop": account.waf_flop,
    }


def _used(account: "Account") -> dict[str, float]:
    return {str(use): gpu_s for use, gpu_s in sorted(account.gpu_s.items(), key=lambda item: -item[1]) if gpu_s}


def _losses(books: "Books") -> list[dict[str, Any]]:
    return [
        {"incident": cause, "gpu_s": loss.gpu_s, "waf_flop": loss.waf_flop, "dollars": loss.dollars}
        for cause, loss in books.losses.items()
    ]
