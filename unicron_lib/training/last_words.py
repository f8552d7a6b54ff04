"""What a rank tells about the exception that ends it, before anything else dies."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from unicron_lib.agent.exception_text import cause_of, context_of, message_of, stack_of
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.training.environment import RankEnvironment
from unicron_lib.training.outvoting import InDoubt


def last_words(
    error: BaseException, env: RankEnvironment, *, iteration: int, error_type: str = "", parked: bool = False
) -> RankFailed:
    """The report of an exception; `error_type` names its type if it only stands for another one."""
    return RankFailed(
        job=env.job,
        generation=env.generation,
        rank=env.rank,
        iteration=iteration,
        error_type=error_type or type(error).__name__,
        message=message_of(error),
        traceback=stack_of(error),
        parked=parked,
        cause=cause_of(error),
        context=context_of(error),
        spoiled=error.spoiled if isinstance(error, InDoubt) else None,
        verdict=error.verdict if isinstance(error, InDoubt) else "",
    )


def end_with_threads(report: Callable[[BaseException], None]) -> None:
    """Have an exception that ends any other thread reported, and the process ended with 1.

    What a rank does in a thread it needs: without it, it would go on half dead, and hang or save nothing.
    """

    def end(gone: threading.ExceptHookArgs) -> NoReturn:
        if gone.exc_value is not None:
            print(f"the thread {gone.thread.name if gone.thread else '?'} has failed", file=sys.stderr)  # noqa: T201
            traceback.print_exception(gone.exc_value)
            report(gone.exc_value)
        os._exit(1)

    threading.excepthook = lambda gone: None if gone.exc_type is SystemExit else end(gone)
