"""The repository against a model, while writers of several generations save, are replaced, and die between any two calls.

Whatever the order: what was committed and counts is found again, what is found is whole, and nobody deletes the work of a
newer generation.
"""

import re
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_store import MemoryStore
from stepped_store import Killed, Operation, Stepped

from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import CheckpointError, StaleGeneration

RETAIN = 2
NUM_RANKS = 2


@dataclass
class Writer:
    """Whoever trains in one generation: saves one iteration after the other until it dies or learns that it was replaced."""

    generation: int
    iteration: int
    store: Stepped
    operation: Operation | None = None
    alive: bool = True


@dataclass
class Model:
    """What must be true: commits that returned and were not fenced off, by iteration and generation."""

    counting: set[tuple[int, int]] = field(default_factory=set)
    damaged: set[tuple[int, int]] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    """Any number of live writers, of which only the newest generation's should win."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.repository = CheckpointRepository(self.store, "a")
        self.model = Model()
        self.writers: list[Writer] = []
        self.fencing: tuple[Operation, int] | None = None
        self.generation = 0
        self._join()

    # --- what happens ------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """A writer of the present generation goes on from the newest checkpoint."""
        newest, _ = self.repository.newest_complete(condemn=True)
        generation = self.generation
        store = Stepped(self.store, lambda call, key, _data: self._deleting(generation, call, key))
        self.writers.append(Writer(generation=generation, iteration=newest.iteration if newest else -1, store=store))

    @staticmethod
    def _deleting(generation: int, call: str, key: str) -> None:
        if call in {"delete", "give_up"} and (place := re.search(r"/shards/i\d+-g(\d+)-", key)):
            assert int(place[1]) <= generation, f"a writer of generation {generation} deleted {key}"

    def _living(self) -> list[Writer]:
        return [writer for writer in self.writers if writer.alive]

    @precondition(lambda self: self._living())
    @rule(data=st.data(), num_steps=st.integers(1, 25), kill=st.sampled_from(["", "", "", "", "before", "after"]))
    def go_on(self, data: st.DataObject, num_steps: int, kill: str) -> None:
        """A writer gets some of its calls done, and may die in the last of them."""
        writer = data.draw(st.sampled_from(self._living()))
        for number in range(num_steps):
            if writer.operation is None:
                writer.iteration += 1
                writer.operation = Operation(writer.store, lambda: self._save(writer))
            writer.operation.step(kill if number == num_steps - 1 else "")
            if writer.operation.is_done:
                self._ended(writer)
                break

    def _save(self, writer: Writer) -> None:
        repository = CheckpointRepository(writer.store, "a")  # type: ignore[arg-type]
        iteration, generation = writer.iteration, writer.generation
        where = {"iteration": iteration, "generation": generation, "save": "all"}
        for rank in range(NUM_RANKS):
            data = f"{iteration}-{generation}-{rank}".encode()
            repository.put_shard(**where, rank=rank, data=data, tensors=(f"t{rank}",))
        shards = repository.find_shards(**where, num_ranks=NUM_RANKS)
        assert shards
        manifest = Manifest(
            job="a",
            generation=generation,
            iteration=iteration,
            loss=1.0,
            consumed_samples=8,
            layout=Layout(dp=NUM_RANKS),
            shards=shards,
        )
        repository.commit(manifest)
        self.model.counting.add((iteration, generation))
        repository.collect(retain=RETAIN, generation=generation)

    @staticmethod
    def _ended(writer: Writer) -> None:
        operation, writer.operation = writer.operation, None
        error = operation.error if operation else None
        if error is not None:
            writer.alive = False
            assert isinstance(error, (Killed, StaleGeneration)), repr(error)

    @precondition(lambda self: self.fencing is None and self.generation < 5)
    @rule()
    def replace(self) -> None:
        """Somebody begins to replace the present generation, without draining it."""
        generation = self.generation + 1
        store = Stepped(self.store, lambda *_: None)
        repository = CheckpointRepository(store, "a")  # type: ignore[arg-type]
        self.fencing = Operation(store, lambda: repository.fence(generation)), generation

    @precondition(lambda self: self.fencing is not None)
    @rule(num_steps=st.integers(1, 10), kill=st.sampled_from(["", "", "before", "after"]))
    def go_on_replacing(self, num_steps: int, kill: str) -> None:
        """It may die, too; then it is done again."""
        assert self.fencing
        operation, generation = self.fencing
        for number in range(num_steps):
            operation.step(kill if number == num_steps - 1 else "")
            if operation.is_done:
                break
        if not operation.is_done:
            return
        self.fencing = None
        if operation.error is None:
            self.generation = generation
            self._join()
        else:
            assert isinstance(operation.error, Killed), repr(operation.error)

    @rule(data=st.data(), how=st.sampled_from(["delete", "truncate", "flip", "empty"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        """A bit flips, or an object gets lost: not what a writer does."""
        newest, _ = self.repository.newest_complete()
        if newest is None or (newest.iteration, newest.generation) in self.model.damaged:
            return
        self.model.damaged.add((newest.iteration, newest.generation))
        key = data.draw(st.sampled_from(newest.shards)).key
        whole = self.store.objects[key]
        match how:
            case "delete":
                del self.store.objects[key]
            case "truncate":
                self.store.objects[key] = whole[:-1]
            case "flip":
                self.store.objects[key] = bytes([whole[0] ^ 1]) + whole[1:]
            case _:
                self.store.objects[newest.key] = b""

    def teardown(self) -> None:
        """Nobody is left waiting."""
        replacing = [self.fencing[0]] if self.fencing else []
        for operation in [*replacing, *(writer.operation for writer in self.writers if writer.operation)]:
            operation.step("before")
            assert operation.is_done

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _loadable(self) -> Manifest | None:
        """What a restoring rank ends up with: damage that shows only when it is read is marked, then the next is tried."""
        while True:
            newest, _ = self.repository.newest_complete(condemn=True)
            if newest is None:
                return None
            try:
                shards = [bytes(shard) for shard in self.repository.load_shards(newest)]
            except CheckpointError as error:
                self.repository.condemn(newest.key, str(error))
                continue
            told = [f"{newest.iteration}-{newest.generation}-{rank}".encode() for rank in range(NUM_RANKS)]
            assert shards == told
            return newest

    @invariant()
    def what_was_committed_is_found(self) -> None:
        whole = self.model.counting - self.model.damaged
        newest = self._loadable()
        if newest is None:
            # all that were kept may have been damaged; without damage nothing is ever lost
            assert not whole or self.model.damaged
            return
        assert (newest.iteration, newest.generation) not in self.model.damaged
        since = {place for place in whole if place > max(self.model.damaged, default=(-1, -1))}
        assert not since or (newest.iteration, newest.generation) >= max(since)

    @invariant()
    def enough_are_kept(self) -> None:
        if self.model.damaged:
            return
        complete = [key for key in self.repository.manifest_keys() if self.repository.look_at(key)[1] == ""]
        assert len(complete) >= min(RETAIN, len({iteration for iteration, _ in self.model.counting}))

    @invariant()
    def a_visible_checkpoint_is_complete(self) -> None:
        """But for one that was damaged, and one that a collector is about to be done with."""
        for key in self.repository.manifest_keys()[:RETAIN]:
            manifest, reason = self.repository.look_at(key)
            place = (manifest.iteration, manifest.generation) if manifest else None
            assert not reason or place is None or self.model.damaged


Machine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_checkpoints_survive_any_order_of_calls_and_deaths = Machine.TestCase
