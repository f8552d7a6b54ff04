"""Threads of which one runs at a time, in an order that a seed decides: every interleaving can be had, and had again."""

import threading
from collections.abc import Callable, Mapping
from random import Random
from typing import Any


class Stuck(AssertionError):
    """All threads wait for each other."""


class Stage:
    """Runs named parts; each calls `pause` wherever others may run, or must have run, before it goes on."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._changed = threading.Condition()
        self._until: dict[int, Callable[[], bool]] = {}
        self._current: int | None = None
        self._is_stuck = False

    def run(self, parts: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """What each part has returned, or the exception that has ended it."""
        outcomes: dict[int, Any] = {}

        def play(name: int) -> None:
            try:
                self._await_turn(name)
                outcomes[name] = parts[name]()
            except BaseException as error:  # noqa: BLE001 - it is the outcome
                outcomes[name] = error.with_traceback(None) if not isinstance(error, AssertionError) else error
            with self._changed:
                del self._until[name]
                self._pass_on()

        self._until = dict.fromkeys(parts, lambda: True)
        threads = [threading.Thread(target=play, args=(name,), daemon=True) for name in parts]
        for thread in threads:
            thread.start()
        with self._changed:
            self._pass_on()
        for thread in threads:
            thread.join()
        for outcome in outcomes.values():
            if isinstance(outcome, AssertionError):
                raise outcome
        return outcomes

    def pause(self, name: int, until: Callable[[], bool] = lambda: True) -> None:
        """Let others run, at least until the condition holds; raises Stuck when it never will."""
        with self._changed:
            self._until[name] = until
            self._pass_on()
        self._await_turn(name)

    def _await_turn(self, name: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._current == name)
            if self._is_stuck:
                raise Stuck(f"part {name} waits, with {sorted(self._until)}, for what nobody does")

    def _pass_on(self) -> None:
        ready = sorted(name for name, until in self._until.items() if until())
        if not ready and self._until:
            self._is_stuck = True
            ready = sorted(self._until)
        self._current = self._random.choice(ready) if ready else None
        self._changed.notify_all()
