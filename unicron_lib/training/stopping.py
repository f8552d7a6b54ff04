"""After which step the ranks of a script stop: all after the same one, or who goes on would wait for the others for ever."""

import logging
import sys
from datetime import timedelta
from typing import Any

from unicron_lib.training.environment import RankEnvironment

log = logging.getLogger(__name__)
STORE_TIMEOUT_S = 10.0


class CommonStop:
    """Agrees by the generation's store, if the script uses torch.distributed; else every rank is its own master.

    Who is asked after step n writes n + 1 into the store, before it takes part in step n + 1. Nobody completes that step
    without it, so whoever looks after n + 1 finds it written: all stop there. This needs one gradient exchange a step.
    """

    def __init__(self, env: RankEnvironment, key: str = "stop") -> None:
        """What ranks are asked to do has a `key` of its own."""
        self._env = env
        self._key = key
        self._store: Any = None
        self._at: int | None = None
        self._is_broken = False

    @property
    def is_common(self) -> bool:
        """Whether other ranks have to be asked."""
        return not self._is_broken and self._env.world_size > 1 and _uses_torch()

    def is_due(self, step: int, *, asked: bool) -> bool:
        """Whether to stop after `step`, which is done; `asked` tells whether this rank was asked to."""
        if not self.is_common:
            return asked
        try:
            self._agree(step, asked=asked)
        except RuntimeError as error:  # its agent is gone, or the generation is over
            log.warning("this rank decides alone when to stop: %s", error)
            self._is_broken = True
            return asked
        return self._at is not None and step >= self._at

    def _agree(self, step: int, *, asked: bool) -> None:
        if self._at is not None:
            return
        self._store = self._store or self._connect()
        if asked:
            self._at = int(self._store.compare_set(self._key, "", str(step + 1)))
        elif self._store.check([self._key]):
            self._at = int(self._store.get(self._key))

    def _connect(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        env, timeout = self._env, timedelta(seconds=STORE_TIMEOUT_S)
        client = TCPStore(env.master_addr, env.master_port, is_master=False, timeout=timeout)
        return PrefixStore(f"unicron/{env.job}/g{env.generation}", client)


def _uses_torch() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
