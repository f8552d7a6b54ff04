"""What has been answered to which step, so that a repeated command has its effect once: pure."""

from collections import OrderedDict

from unicron_lib.agent.messages import Reply


class StepMemo:
    """The newest `capacity` good answers by step id. Refusals are not kept: the same step may be tried again."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._replies: OrderedDict[str, Reply] = OrderedDict()

    def recall(self, step: str) -> Reply | None:
        """The answer given to `step`, None if it was never done."""
        return self._replies.get(step)

    def keep(self, reply: Reply) -> None:
        """Remember a good answer; the first one given to a step stays."""
        if reply.ok:
            self._replies.setdefault(reply.step, reply)
        while len(self._replies) > self._capacity:
            self._replies.popitem(last=False)
