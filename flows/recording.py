"""A recovery at work in this process, and the flow run that shows it: what heals never waits for Prefect.

The recovery service answers an incident at once, by plain functions. The flow run that it has meanwhile made shows each thing
that is done as a task run, with its result and what was logged. Where nobody is at work, as in a worker, the flow does it all.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from flows.acts import Act, AnyTask
from flows.response import as_task, respond
from tasks.planning import complete
from tasks.reporting import report_recovery
from tasks.services import services

_shown: ContextVar["Work | None"] = ContextVar("_shown", default=None)


class Work:
    """What is done for an incident, in its order, a `with` block long."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._acts: list[Act] = []
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Nothing more will be done; the run that shows it fails as the work has."""
        self._error = error
        self._over.set()
        self._news.set()

    async def call(self, task: AnyTask, *args: object) -> Any:
        """Do what a task does, as the function that it is."""
        act = Act(task=task, args=args, after=[act for act in self._acts if act.ended.is_set()])
        self._acts.append(act)
        self._news.set()
        return await act.do()

    async def over(self, within_s: float | None = None) -> None:
        """Wait until it is, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._over.wait()

    @property
    def has_failed(self) -> bool:
        """Whether it broke off: it will be taken up again."""
        return self._error is not None

    async def show(self) -> None:
        """A task run for each thing that was done, is done and will be, and the reports of what was completed."""
        runs = list[asyncio.Task[None]]()
        try:
            while len(runs) < len(self._acts) or not self._over.is_set():
                self._news.clear()
                runs += [asyncio.create_task(act.show()) for act in self._acts[len(runs) :]]
                if not self._over.is_set():
                    await self._news.wait()
            await asyncio.gather(*runs, return_exceptions=True)
        finally:
            for run in runs:
                run.cancel()
        state = services().journal.state
        for act in self._acts:
            if act.task is complete and act.error is None:
                await report_recovery(state, state.plans[str(act.args[0])])
        if self._error is not None:
            raise self._error


@contextmanager
def shown_by_a_run(work: Work) -> Iterator[None]:
    """Within, a flow run that is to answer an incident shows how `work` does so."""
    token = _shown.set(work)
    try:
        yield
    finally:
        _shown.reset(token)


async def answer(incident: str | None) -> None:
    """What the flows do: work until `incident` is over, or show the work that this process does for it."""
    work = _shown.get()
    await (respond(as_task, incident=incident) if work is None else work.show())
