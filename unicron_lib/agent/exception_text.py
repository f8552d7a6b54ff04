"""An exception in words: short whatever it holds, since a text of 100 MB must not be copied over and over."""

import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from unicron_lib.agent.excerpt import SHORT_LIMIT, excerpt

TEXT_LIMIT = 16 << 10
"""Characters of a message, and of a traceback."""
MAX_FRAMES = 100
"""Of a deeper stack the outermost and the innermost frames are told, half each."""
MAX_CHAIN = 20


def message_of(error: BaseException, limit: int = TEXT_LIMIT) -> str:
    """Its text, at most `limit` characters, also if it refuses to be printed."""
    try:
        return excerpt(str(error), limit)
    except Exception as broken:  # noqa: BLE001 - an exception that cannot even be printed is reported, too
        return f"its text cannot be had: {type(broken).__name__}"


def stack_of(error: BaseException) -> str:
    """The traceback nearly as Python prints it, the earliest exception first; at most TEXT_LIMIT characters."""
    return excerpt("".join(_stack(error)), TEXT_LIMIT)


def cause_of(error: BaseException) -> str:
    """The earliest exception that it was raised from, "Type: message"; empty if there is none."""
    return _described(_earliest(error, lambda e: e.__cause__))


def context_of(error: BaseException) -> str:
    """The earliest exception that was being handled when it was raised, told likewise."""
    return _described(_earliest(error, lambda e: None if e.__cause__ or e.__suppress_context__ else e.__context__))


def _described(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {message_of(error, SHORT_LIMIT)}" if error else ""


def _earliest(error: BaseException, before: Callable[[BaseException], BaseException | None]) -> BaseException | None:
    """The end of a chain, None if there is none."""
    *_, last = _chain(error, before)
    return None if last is error else last


def _chain(error: BaseException, before: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen and len(seen) < MAX_CHAIN:
        yield link
        seen.add(id(link))
        link = before(link)


def _stack(error: BaseException) -> Iterator[str]:
    earlier = list(_chain(error, lambda e: e.__cause__ or (None if e.__suppress_context__ else e.__context__)))
    for link in reversed(earlier):
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_list(_frames(link.__traceback__))
        yield f"{type(link).__name__}: {message_of(link, SHORT_LIMIT)}\n"


def _frames(stack: TracebackType | None) -> traceback.StackSummary:
    frames = traceback.StackSummary.extract(traceback.walk_tb(stack), lookup_lines=False)
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        frames = traceback.StackSummary.from_list([*frames[:half], *frames[-half:]])
    return frames
