"""States in the memory of this node, beyond the lives of its ranks: kept, copied to a peer, found, fetched and forgotten."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from unicron_lib.agent.copying import Copying
from unicron_lib.agent.environment import NodeFacts
from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.memory_messages import FetchMemory, FindMemory, ForgetMemory
from unicron_lib.agent.ranks import Ranks
from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.agent.slot_places import slot_directory
from unicron_lib.agent.slot_wire import Get, SlotServer, fetch
from unicron_lib.checkpointing.slot_header import SlotHeader
from unicron_lib.domain.events import Scalar
from unicron_lib.errors import AgentError, SlotError

log = logging.getLogger(__name__)
Result = dict[str, Scalar | list[dict[str, Scalar]]]
LOOK_S = 0.2
SWEEP_S = 60.0


class NodeMemory:
    """One node's part in it."""

    def __init__(self, *, facts: NodeFacts, token: str, ranks: Ranks, fence: Fence) -> None:
        self._facts = facts
        self._token = token
        self._ranks = ranks
        self._fence = fence
        self._house = SlotHouse(slot_directory(facts.run_dir, facts.node))
        self._server = SlotServer(house=self._house, token=token, refusal=self._refusal)
        self._copying = Copying(self._house, token)
        self._launched: dict[str, Callable[[], int]] = {}
        self.wipe = self._house.wipe

    def start(self) -> int:
        """Take and give from now on; returns the port, 0 if that cannot be."""
        self._server.start(self._facts.address)
        return self._server.port

    async def run(self) -> None:
        """Copy what is new to peers, and remove what nobody needs, until cancelled."""
        swept_at = float("-inf")
        while True:
            try:
                if time.monotonic() - swept_at > SWEEP_S:
                    swept_at = time.monotonic()
                    await self._sweep()
                await self._copying.look()
            except OSError as error:
                log.warning("the states in this node's memory could not be looked after: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _sweep(self) -> None:
        busy = {rank.job for rank in self._ranks.alive}
        self._copying.keep_only(busy)
        self._launched = {job: forget for job, forget in self._launched.items() if job in busy}
        for forget_other_layouts in tuple(self._launched.values()):
            await asyncio.to_thread(forget_other_layouts)  # memory of many GB is given back no faster than it is taken
        await asyncio.to_thread(self._house.sweep, busy)

    def close(self) -> None:
        """Leave nothing behind."""
        self._server.close()
        self._copying.close()
        self.wipe()

    def follow(self, job: str, peers: Sequence[str], parts: Collection[str], *, generation: int) -> None:
        """Copy the states of a job, or those parts that are launched here, to the first of these peers that takes them."""
        self._copying.follow(job, peers, parts)
        self._launched[job] = partial(
            self._house.forget_other_layouts, job, tuple(parts), generation=generation, travel=bool(peers)
        )

    async def carry_out(self, command: FindMemory | FetchMemory | ForgetMemory) -> Result:
        """Do what the control host wants; raises AgentError."""
        match command:
            case FindMemory():
                return await self._find(command)
            case FetchMemory():
                return await self._fetch(command)
            case ForgetMemory():
                return await self._forget(command)

    async def _find(self, command: FindMemory) -> Result:
        whole, reasons = await asyncio.to_thread(self._house.compared, command.job)
        return {"slots": [_told(header) for header in whole], "skipped": "; ".join(reasons)}

    async def _fetch(self, command: FetchMemory) -> Result:
        pair = self._house.pair(command.job, command.part)
        place = command.slot_generation, command.iteration
        wanted = Get(job=command.job, generation=place[0], iteration=place[1], part=command.part)
        reasons = []
        for holder in command.holders:
            began = time.monotonic()
            try:
                header = await asyncio.to_thread(fetch, holder, self._token, pair, wanted)
            except (SlotError, OSError) as error:
                reasons.append(f"{holder}: {error}")
                continue
            return {"holder": holder, "num_bytes": header.num_bytes, "seconds": time.monotonic() - began}
        raise AgentError(f"iteration {command.iteration} of {command.job} was not fetched: {'; '.join(reasons)}")

    async def _forget(self, command: ForgetMemory) -> Result:
        self._copying.follow(command.job, ())
        return {"removed": await asyncio.to_thread(self._house.forget, command.job, command.below_generation)}

    def _refusal(self, header: SlotHeader) -> str:
        is_replaced = not self._fence.admits(header.job, header.generation)
        return self._fence.refusal(header.job, header.generation) if is_replaced else ""


def _told(header: SlotHeader) -> dict[str, Scalar]:
    place = {"generation": header.generation, "iteration": header.iteration}
    return {**place, "num_bytes": header.num_bytes, "part": header.part}
