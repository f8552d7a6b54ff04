"""One thing that is done at once, and shown in Prefect as a task run while it lasts, or afterwards."""

import asyncio
import copy
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from prefect import Task, get_run_logger

AnyTask = Task[Any, Coroutine[Any, Any, Any]]
log = logging.getLogger("unicron.recording")
_under_way: ContextVar["Act | None"] = ContextVar("_under_way", default=None)


@dataclass(slots=True, kw_only=True)
class Act:
    """One thing that is done: a task's function with `args`, begun `after` others had ended. What it logs is kept."""

    task: AnyTask
    args: tuple[object, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    result: Any = None
    error: BaseException | None = None
    logged: list[logging.LogRecord] = field(default_factory=list)
    after: Sequence["Act"] = ()
    shown: asyncio.Event = field(default_factory=asyncio.Event)

    async def do(self) -> Any:
        """Do it."""
        token = _under_way.set(self)
        try:
            self.result = await self.task.fn(*self.args)
        except BaseException as error:
            self.error = error
            raise
        finally:
            _under_way.reset(token)
            self.ended.set()
        return self.result

    async def show(self) -> None:
        """A task run that lasts until it is done, and ends as it did."""
        for earlier in self.after:
            await earlier.shown.wait()
        task = copy.copy(self.task)
        task.fn = self._outcome()
        try:
            await task(*self.args)
        finally:
            self.shown.set()

    async def show_if_possible(self) -> None:
        """As `show`; what ails Prefect is only logged."""
        try:
            await self.show()
        except Exception as error:  # noqa: BLE001 - what was to be done is done
            log.warning("Prefect did not show %s: %s", self.task.name, error)

    def _outcome(self) -> Any:
        @wraps(self.task.fn)
        async def outcome(*_args: object) -> Any:
            await self.ended.wait()
            _log_again(self.logged)
            if self.error is not None:
                raise self.error
            return self.result

        return outcome


def _log_again(records: Iterable[logging.LogRecord]) -> None:
    """Have the task run, in which this is called, log what was logged elsewhere, at its own time."""
    run = get_run_logger()
    assert isinstance(run, logging.LoggerAdapter)
    for record in records:
        record.__dict__.update(run.extra or {})
        run.logger.handle(record)


class Overhearing(logging.Handler):
    """Keeps what is logged while something is done, for those who show it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        act = _under_way.get()
        if act is not None:
            act.logged.append(record)
