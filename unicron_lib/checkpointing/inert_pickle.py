"""Pickles of others, read without being loaded: no name in them is looked up, and nothing in them is ever called.

torch's `.metadata` and Megatron's `common.pt` are pickles, programs for a small machine that may call any function of any
module. Here that machine only takes notes: where a pickle names something there stands a `Named`, where it would call or
build something a `Made`. Whoever wants the facts finds them by their places and checks their types. The list of names that
such files need is there so that a file that was made to do harm is refused, and not just harmless.
"""

import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unicron_lib.errors import CheckpointError

EXPECTED = (
    *("torch", "megatron", "transformer_engine", "numpy", "pathlib", "collections.OrderedDict", "collections.defaultdict"),
    *("argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "enum", "datetime", "_codecs.encode", "io.BytesIO"),
)
"""Modules and names that checkpoints of torch and Megatron mention: `torch` is that module and all below it."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_IGNORED = {"PROTO", "FRAME"}


@dataclass(frozen=True, slots=True)
class Named:
    """A name, `module.name`."""

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What would have been a call of `what` with `arguments`, and then an object with `state`."""

    what: object
    arguments: object
    state: object = None

    @property
    def name(self) -> str:
        """The name that it would have been made by, empty if that is none."""
        return self.what.name if isinstance(self.what, Named) else ""


def read_inert(data: bytes, *, origin: str) -> Any:
    """What the pickle describes: plain data, with a `Named` or a `Made` in place of everything else.

    `origin` names it in errors. Raises CheckpointError for a damaged pickle, and for one with a name that is not EXPECTED.
    """
    try:
        return _Notes(origin).read(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{origin} is damaged: it is no whole pickle") from error


class _Notes:
    """The machine: a stack, the stacks below the marks, and what is remembered by number."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name in _LITERALS:
                self._stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name not in _IGNORED:
                getattr(self, f"_{opcode.name.lower()}")(argument)
        raise ValueError("there is no end")

    # --- the stack ---------------------------------------------------------------------------------------------------

    def _mark(self, _: object) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        since, self._stack = self._stack, self._below.pop()
        return since

    def _pop(self, _: object) -> None:
        self._stack.pop()

    def _memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    _binput = _long_binput = _put

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    _binget = _long_binget = _get

    # --- plain data --------------------------------------------------------------------------------------------------

    def _empty_list(self, _: object) -> None:
        self._stack.append([])

    def _empty_dict(self, _: object) -> None:
        self._stack.append({})

    def _empty_set(self, _: object) -> None:
        self._stack.append(set())

    def _empty_tuple(self, _: object) -> None:
        self._stack.append(())

    def _tuple(self, _: object) -> None:
        since = self._since_mark()
        self._stack.append(tuple(since))

    def _list(self, _: object) -> None:
        since = self._since_mark()
        self._stack.append(since)

    def _dict(self, _: object) -> None:
        since = self._since_mark()
        self._stack.append(dict(zip(since[::2], since[1::2], strict=True)))

    def _tuple_of(self, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _tuple1(self, _: object) -> None:
        self._tuple_of(1)

    def _tuple2(self, _: object) -> None:
        self._tuple_of(2)

    def _tuple3(self, _: object) -> None:
        self._tuple_of(3)

    def _append(self, _: object) -> None:
        self._extend([self._stack.pop()])

    def _appends(self, _: object) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: Iterable[Any]) -> None:
        if isinstance(self._stack[-1], list):  # a Made may be a list of its own kind, whose content nobody asks for
            self._stack[-1].extend(values)

    def _additems(self, _: object) -> None:
        since = self._since_mark()
        self._stack[-1].update(since)

    def _setitem(self, _: object) -> None:
        self._fill(self._stack[-2:], keep=2)

    def _setitems(self, _: object) -> None:
        self._fill(self._since_mark(), keep=0)

    def _fill(self, pairs: list[Any], *, keep: int) -> None:
        if keep:
            del self._stack[-keep:]
        target = self._stack[-1]
        if isinstance(target, Made):  # an OrderedDict, for one
            target.state = target.state if isinstance(target.state, dict) else {}
            target = target.state
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    # --- what would have been names and calls --------------------------------------------------------------------------

    def _global(self, module_and_name: str) -> None:
        self._stack.append(self._name(module_and_name.replace(" ", ".", 1)))

    def _stack_global(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(self._name(f"{module}.{name}"))

    def _name(self, name: str) -> Named:
        if not any(name == known or name.startswith(f"{known}.") for known in EXPECTED):
            raise CheckpointError(f"{self._origin} is refused: it names {name[:100]!r}, which no checkpoint needs")
        return Named(name)

    def _reduce(self, _: object) -> None:
        arguments, what = self._stack.pop(), self._stack.pop()
        self._stack.append(Made(what, arguments))

    _newobj = _reduce

    def _newobj_ex(self, _: object) -> None:
        self._stack.pop()
        self._reduce(None)

    def _build(self, _: object) -> None:
        state = self._stack.pop()
        self._stack[-1].state = state

    def _binpersid(self, _: object) -> None:
        self._stack.append(Made(None, self._stack.pop()))
