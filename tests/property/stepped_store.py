"""Operations on a store that go on one call at a time, interleaved as a test wants, and die between any two."""

import threading
from collections.abc import Callable
from typing import Any

from memory_store import MemoryStore

PATIENCE_S = 30.0


class Killed(BaseException):
    """The process of an operation is gone: no handler of its own sees that."""


class Stepped:
    """A store for one writer. Each call waits until it is let through; `kill` ends the writer before or after it."""

    url = "memory:///"

    def __init__(self, store: MemoryStore, told: Callable[[str, str, bytes], None]) -> None:
        self._store = store
        self._told = told
        self._turn = threading.Semaphore(0)
        self._paused = threading.Event()
        self._kill = ""

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._store, name)

        def call(key: str, *args: Any, **named: Any) -> Any:
            self._wait()
            if name == "upload":
                self._store.begin(key)
                self._wait()  # it may die halfway
            result = act(key, *args, **named)
            if result is not False:
                self._told(name, key, bytes(args[0]) if name in {"put", "put_if_absent", "upload"} else b"")
            if self._kill == "after":
                raise Killed
            return result

        return call

    def _wait(self) -> None:
        self._paused.set()
        assert self._turn.acquire(timeout=PATIENCE_S)
        if self._kill == "before":
            raise Killed


class Operation:
    """Something that a writer does, on a thread of its own."""

    def __init__(self, store: Stepped, act: Callable[[], None]) -> None:
        self._store = store
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()
        self._until_paused()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self._done = True
            self._store._paused.set()

    _done = False

    @property
    def is_done(self) -> bool:
        return self._done

    def step(self, kill: str = "") -> None:
        """Let one call through; with `kill` "before" or "after" it is the last."""
        self._store._kill = kill
        self._store._paused.clear()
        self._store._turn.release()
        self._until_paused()

    def _until_paused(self) -> None:
        assert self._store._paused.wait(PATIENCE_S)
        if self._done:
            self._thread.join(PATIENCE_S)
