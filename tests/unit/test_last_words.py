"""What is told about an exception, whatever it holds."""

import subprocess
import sys
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.agent.exception_text import TEXT_LIMIT, cause_of, context_of, message_of, stack_of
from unicron_lib.agent.excerpt import SHORT_LIMIT, excerpt
from unicron_lib.agent.rank_messages import RankFailed, from_rank
from unicron_lib.agent.repeats import MOST_TOLD, Repeats


def caught(raise_it: object) -> BaseException:
    try:
        raise_it()  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def deep(levels: int) -> None:
    if levels == 0:
        raise ValueError("at the bottom")
    deep(levels - 1)


def chained() -> None:
    try:
        try:
            {}["input_ids"]
        except KeyError as error:
            raise OSError("no batch") from error
    except OSError as error:
        raise RuntimeError("training failed") from error


def in_cleanup() -> None:
    try:
        {}["x"]
    finally:
        raise RuntimeError("cleaning up failed")


def instead() -> None:
    try:
        {}["x"]
    except KeyError:
        raise RuntimeError("hidden on purpose") from None


def test_a_traceback_has_the_place_the_text_and_the_chain() -> None:
    text = stack_of(caught(chained))
    assert text.index("KeyError: 'input_ids'") < text.index("OSError: no batch") < text.index("RuntimeError: training failed")
    assert "in chained" in text
    assert __file__ in text


def test_the_earliest_cause_and_context_are_named() -> None:
    assert (cause_of(caught(chained)), context_of(caught(chained))) == ("KeyError: 'input_ids'", "")
    assert (cause_of(caught(in_cleanup)), context_of(caught(in_cleanup))) == ("", "KeyError: 'x'")
    assert (cause_of(caught(instead)), context_of(caught(instead))) == ("", "")
    assert cause_of(caught(lambda: deep(1))) == ""


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert cause_of(first) == "ValueError: second"
    assert "second" in stack_of(first)


def test_a_deep_stack_keeps_its_ends() -> None:
    text = stack_of(caught(lambda: deep(900)))
    assert len(text) <= TEXT_LIMIT
    assert "in <lambda>" in text
    assert text.endswith("ValueError: at the bottom\n")


def test_a_text_of_100_mb_is_not_copied() -> None:
    error = caught(lambda: (_ for _ in ()).throw(RuntimeError("head" + "x" * 100_000_000 + "tail")))
    tracemalloc.start()
    try:
        message, stack = message_of(error), stack_of(error)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message.startswith("head")
    assert message.endswith("tail")
    assert len(message) <= TEXT_LIMIT
    assert len(stack) <= TEXT_LIMIT
    assert peak < 10_000_000


def test_an_exception_that_refuses_to_be_printed_is_told() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert "ZeroDivisionError" in message_of(Mute())
    assert "Mute" in stack_of(caught(lambda: (_ for _ in ()).throw(Mute())))


def report(message: str, *, iteration: int = 3) -> RankFailed:
    return RankFailed(
        job="a",
        generation=1,
        rank=0,
        iteration=iteration,
        error_type="RuntimeError",
        message=message,
        traceback="",
        parked=False,
    )


@given(st.text(st.characters(exclude_categories=())), st.integers(64, 300))
def test_an_excerpt_can_always_be_sent(text: str, limit: int) -> None:
    short = excerpt(text, limit)
    assert len(short) <= limit
    assert excerpt(short, limit) == short
    assert from_rank.validate_json(from_rank.dump_json(report(short))) == report(short)


def test_a_rank_that_repeats_itself_is_heard_at_powers_of_ten() -> None:
    repeats = Repeats()
    heard = [repeats.news(report("x")) for _ in range(10_000)]
    told = [(number + 1, news.message) for number, news in enumerate(heard) if news]
    assert told == [(1, "x"), *((10**n, f"x\n[said {10**n} times so far]") for n in range(1, 5))]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_nothing_distinct_is_left_out(story: list[int]) -> None:
    repeats = Repeats()
    heard = [news.message.partition("\n")[0] for number in story if (news := repeats.news(report(str(number))))]
    assert set(heard) == {str(number) for number in story}
    assert [m for i, m in enumerate(heard) if m not in heard[:i]] == [str(n) for n in dict.fromkeys(story)], "nor reordered"


def test_a_rank_tells_so_many_different_failures_the_others_are_counted() -> None:
    """But a new type of error is always told, so that a flood hides no other one."""
    repeats = Repeats()
    heard = [news for number in range(10_000) if (news := repeats.news(report(str(number))))]
    assert [news.message for news in heard[:MOST_TOLD]] == [str(number) for number in range(MOST_TOLD)]
    counted = [news.message.partition("\n")[2] for news in heard[MOST_TOLD:]]
    assert counted == [f"[one of {10**n} beyond the first 64, which are counted only]" for n in range(4)]
    assert repeats.news(replace(report("0"), error_type="MemoryError")) is not None
    types = [repeats.news(replace(report("0"), error_type=f"E{number}")) for number in range(10_000)]
    assert sum(news is not None for news in types) < 2 * MOST_TOLD + 10
    assert len(repeats._counts) <= 2 * MOST_TOLD


def test_what_names_a_cause_is_short() -> None:
    def raise_it() -> None:
        raise RuntimeError from ValueError("x" * 1_000_000)

    assert len(cause_of(caught(raise_it))) <= SHORT_LIMIT + len("ValueError: ")


THREADS = """
import sys, threading
from unicron_lib.training.last_words import end_with_threads
end_with_threads(lambda error: print("told:", type(error).__name__, error, flush=True))
def fail(): {statement}
thread = threading.Thread(target=fail)
thread.start()
thread.join()
print("lives on", flush=True)
"""


@pytest.mark.parametrize(
    ("statement", "code", "told"),
    [
        ("raise KeyError(7)", 1, "told: KeyError 7\n"),
        ("sys.exit(3)", 0, "lives on\n"),
        ("pass", 0, "lives on\n"),
    ],
)
def test_an_exception_in_another_thread_is_told_and_ends_the_process(statement: str, code: int, told: str) -> None:
    script = THREADS.format(statement=statement)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, told)
    assert ("KeyError: 7" in ended.stderr) is (code == 1)
