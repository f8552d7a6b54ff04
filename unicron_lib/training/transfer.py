"""Tensors from rank to rank, piece by piece, checked where they arrive."""

import zlib
from collections.abc import Iterator, Sequence

import torch

from unicron_lib.errors import UnicronError
from unicron_lib.training.peers import Peers

PIECE_BYTES = 16 << 20


class CopyDamaged(UnicronError):
    """What a rank received is not what the other one sent."""


def send_checked(peers: Peers, tensors: Sequence[torch.Tensor], to: int) -> None:
    """Give flat tensors to a rank that calls `receive_checked` for as many of the same sizes; raises CollectiveFailed."""
    digest = 0
    for piece in _pieces(tensors):
        peers.send(piece, to)
        digest = _digest(piece, digest)
    peers.send(torch.tensor([digest], dtype=torch.int64, device=tensors[0].device), to)


def receive_checked(peers: Peers, tensors: Sequence[torch.Tensor], source: int) -> int:
    """Fill flat tensors; returns the number of bytes. Raises CollectiveFailed, or CopyDamaged if the digests differ."""
    digest = received = 0
    for piece in _pieces(tensors):
        peers.receive(piece, source)
        digest = _digest(piece, digest)
        received += piece.nbytes
    theirs = torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
    peers.receive(theirs, source)
    if int(theirs) != digest:
        raise CopyDamaged(
            f"the {received} bytes that rank {peers.rank} received from rank {source} have the digest {digest:08x}, "
            f"sent was {int(theirs):08x}: suspect the memory or the network of one of their nodes"
        )
    return received


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield from torch.split(tensor, max(1, PIECE_BYTES // tensor.element_size()))


def _digest(piece: torch.Tensor, before: int) -> int:
    return zlib.crc32(piece.detach().cpu().view(torch.uint8).numpy().data, before)
