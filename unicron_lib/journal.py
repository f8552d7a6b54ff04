"""The journal: an append-only log of events in the object store, the only truth there is.

Entry n is `journal/<n>.json`, written by conditional put: of two writers racing for a number one wins, the other reads
the winner's entry and tries the next. An event's id is journalled at most once. Every `SNAPSHOT_EVERY` entries the
folded state is stored too, so that a start does not read the whole log.
"""

import json
import threading
import uuid
from dataclasses import dataclass
from typing import Annotated

from pydantic import Discriminator, TypeAdapter

from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event
from unicron_lib.domain.journal import fold
from unicron_lib.errors import IllegalTransition, ObjectNotFound

SNAPSHOT_EVERY = 200

event_json: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Discriminator("type")])
state_json: TypeAdapter[ClusterState] = TypeAdapter(ClusterState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event at its place in the journal."""

    seq: int
    writer: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    state: ClusterState
    ids: tuple[str, ...]


_entry_json: TypeAdapter[Entry] = TypeAdapter(Entry)
_snapshot_json: TypeAdapter[_Snapshot] = TypeAdapter(_Snapshot)


def _entry_key(seq: int) -> str:
    return f"journal/{seq:012d}.json"


class Journal:
    """A reader and writer of the journal in `store`. Calls block; one instance may be used from several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._writer = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._state = ClusterState()
        self._ids: set[str] = set()
        self._started = False

    @property
    def state(self) -> ClusterState:
        """The state as of the last refresh or append."""
        return self._state

    def refresh(self) -> ClusterState:
        """Read what others have written; costs one request when there is nothing new."""
        with self._lock:
            return self._catch_up()

    def append(self, event: Event) -> bool:
        """Journal `event`; False if its id is there already.

        Raises IllegalTransition, and writes nothing, if it cannot follow what is there. Costs one request if nobody else has
        written anything since this journal last looked.
        """
        with self._lock:
            state = self._state if self._started else self._catch_up()
            while event.id not in self._ids:
                try:
                    after = fold(state, event)
                except IllegalTransition:
                    known, state = state, self._catch_up()
                    if state.seq == known.seq and event.id not in self._ids:
                        raise
                    continue
                entry = Entry(seq=after.seq, writer=self._writer, event=event)
                if self._store.put_if_absent(_entry_key(entry.seq), _entry_json.dump_json(entry)):
                    self._accept(after, event.id)
                    return True
                state = self._catch_up()
            return False

    def entries(self) -> list[Entry]:
        """The whole journal from its first entry."""
        return [_entry_json.validate_json(self._store.get(key)) for key in self._store.list("journal/")]

    def _catch_up(self) -> ClusterState:
        if not self._started:
            self._load_snapshot()
            self._started = True
        while True:
            try:
                raw = self._store.get(_entry_key(self._state.seq + 1))
            except ObjectNotFound:
                return self._state
            event = _entry_json.validate_json(raw).event
            self._accept(fold(self._state, event), event.id)

    def _accept(self, state: ClusterState, event_id: str) -> None:
        self._state = state
        self._ids.add(event_id)
        if state.seq % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
            snapshot = _Snapshot(state=state, ids=tuple(sorted(self._ids)))
            self._store.put_if_absent(f"snapshots/{state.seq:012d}.json", _snapshot_json.dump_json(snapshot))

    def _load_snapshot(self) -> None:
        keys = self._store.list("snapshots/")
        if keys:
            snapshot = _snapshot_json.validate_json(self._store.get(keys[-1]))
            self._state, self._ids = snapshot.state, set(snapshot.ids)


def dump_state(state: ClusterState) -> dict[str, object]:
    """The state as JSON-ready data."""
    loaded: dict[str, object] = json.loads(state_json.dump_json(state))
    return loaded
