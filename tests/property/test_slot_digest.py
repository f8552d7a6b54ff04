"""The digest of a state is the same in whatever pieces it comes."""

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lib.checkpointing.slot_digest import BLOCK_BYTES, Digest, digest_of

sizes = st.one_of(st.integers(0, 40), st.integers(BLOCK_BYTES - 9, BLOCK_BYTES + 9), st.integers(0, 3 * BLOCK_BYTES))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(sizes, max_size=6), seed=st.integers(0, 1 << 32))
def test_pieces_have_the_digest_of_the_whole(lengths: list[int], seed: int) -> None:
    state = memoryview(np.random.default_rng(seed).bytes(sum(lengths)))
    digest, at = Digest(), 0
    for length in lengths:
        assert digest.hexdigest() == digest_of(state[:at])
        digest.update(state[at : at + length])
        at += length
    assert digest.hexdigest() == digest_of(state) == as_slots_have_told_it_since_format_1(state)


def as_slots_have_told_it_since_format_1(state: memoryview) -> str:
    """Agents of several versions exchange slots."""
    whole = len(state) // BLOCK_BYTES
    blocks = (np.frombuffer(state[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], dtype=np.uint64) for at in range(whole))
    sums = b"".join(int(block.sum(dtype=np.uint64)).to_bytes(8, "little") for block in blocks)
    return hashlib.sha256(sums + state[whole * BLOCK_BYTES :]).hexdigest()
