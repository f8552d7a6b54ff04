"""Pickles of others are read without being loaded: plain data comes out as it went in, and nothing is ever called."""

import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lib.checkpointing.inert_pickle import Made, Named, read_inert
from unicron_lib.errors import CheckpointError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.lists(inner, max_size=5).map(tuple),
    max_leaves=20,
)


class Harm:
    """Would make a file if it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@given(value=plain, protocol=st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_data_comes_out_as_it_went_in(value: object, protocol: int) -> None:
    assert read_inert(pickle.dumps(value, protocol), origin="it") == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_would_do_harm_is_refused_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": [Harm(tmp_path / "made")]}, protocol)
    with pytest.raises(CheckpointError, match=r"^/x/common.pt is refused: it names 'posix.mkdir', which no checkpoint needs$"):
        read_inert(data, origin="/x/common.pt")
    assert not (tmp_path / "made").exists()
    pickle.loads(data)
    assert (tmp_path / "made").exists()


def test_an_expected_name_is_not_called_either(tmp_path: Path) -> None:
    """Whatever torch or Megatron could be made to do: the file only says a name."""
    data = b"\x80\x02ctorch.hub\nload\n" + pickle.dumps((str(tmp_path),), 2)[2:-1] + b"R."
    made = read_inert(data, origin="it")
    assert isinstance(made, Made)
    assert (made.name, made.arguments) == ("torch.hub.load", (str(tmp_path),))


def test_names_that_only_begin_like_expected_ones_are_refused() -> None:
    for name in (b"torchaudio\nload", b"argparse\n_os", b"builtins\neval", b"enumerate\nx", b"pathlib_\nPath"):
        with pytest.raises(CheckpointError, match="which no checkpoint needs"):
            read_inert(b"c" + name + b"\n.", origin="it")


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_become_what_they_are_made_of(protocol: int) -> None:
    told = read_inert(pickle.dumps({"args": Namespace(lr=0.1, path=Path("/a"))}, protocol), origin="it")
    args = told["args"]
    assert (args.name, args.arguments) == ("argparse.Namespace", ())
    assert args.state["lr"] == 0.1
    assert args.state["path"].name.rpartition(".")[2] == "PosixPath"
    ordered = read_inert(pickle.dumps(OrderedDict(a=1), protocol), origin="it")
    assert (ordered.what, ordered.state) == (Named("collections.OrderedDict"), {"a": 1})


@given(value=plain, cut=st.floats(0, 0.999))
def test_a_part_of_a_pickle_is_damaged(value: object, cut: float) -> None:
    data = pickle.dumps([value], 4)
    with pytest.raises(CheckpointError, match="it is no whole pickle"):
        read_inert(data[: int(len(data) * cut)], origin="it")


@given(data=st.binary(max_size=60))
def test_noise_gives_an_answer_or_one_kind_of_error(data: bytes) -> None:
    with suppress(CheckpointError):
        read_inert(data + b".", origin="it")
