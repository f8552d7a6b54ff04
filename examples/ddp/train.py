"""A tiny character GPT with DistributedDataParallel, in the manner of nanoGPT: torch only, on CPUs or GPUs.

    torchrun --nproc-per-node 2 train.py        or under Unicron: unicron submit ddp.yaml

It saves every few steps and resumes by itself, on any number of ranks. Unicron needs the lines with `run` in them to see
progress, and those with `attempt` to keep the process when other ranks are lost; without them, a crash would be healed as well.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unicron_lib.training.session import Session, session

TEXT = Path(__file__).read_bytes()  # every script holds a text to learn from
CONTEXT, WIDTH = 32, 32


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        return self.head(self.layers(hidden, mask=causal, is_causal=True))


def batch(step: int, size: int, device: torch.device) -> torch.Tensor:
    """This rank's share of the step's batch, which is the same on any number of ranks."""
    order = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - CONTEXT - 1, (size,), generator=order)[dist.get_rank() :: dist.get_world_size()]
    return torch.tensor([list(TEXT[start : start + CONTEXT + 1]) for start in starts.tolist()], device=device)


class Training:
    """All that is worth keeping in memory; a process group is none of it. The device stays, whatever LOCAL_RANK is later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = GPT().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.done = 0

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def share_newest(it: Training) -> None:
    """All ranks go on from the newest state that one of them has."""
    done: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(done, it.done)
    newest = done.index(max(done))
    shared = [it.state() if dist.get_rank() == newest else {}]
    if min(done) < max(done):
        dist.broadcast_object_list(shared, newest, device=it.device)
    if it.done < max(done):
        it.load(shared[0])
        print(f"took the state after step {it.done - 1} from rank {newest}", flush=True)


def save(path: Path, it: Training) -> None:
    """In one piece: who dies while saving leaves the checkpoint before."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(it.state(), partial)
        partial.replace(path)
    dist.barrier()


def train(it: Training, run: Session, options: argparse.Namespace) -> None:
    """On the ranks that there are now. May be left in the middle of a step, and called again."""
    dist.init_process_group("nccl" if it.device.type == "cuda" else "gloo")
    share_newest(it)
    model = DistributedDataParallel(it.model)
    for step in range(it.done, options.steps):
        began = time.monotonic()
        tokens = batch(step, options.batch_size, it.device)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        it.optimizer.zero_grad()
        loss.backward()
        it.optimizer.step()
        it.done = step + 1
        time.sleep(max(0.0, options.pace_s - (time.monotonic() - began)))
        run.step(step, loss=loss.item())
        if run.should_stop:
            break
        if it.done % options.save_every == 0:
            with run.section("checkpoint"):
                save(options.checkpoint, it)
    with run.section("checkpoint"):
        save(options.checkpoint, it)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pace-s", type=float, default=0.0, help="a step takes at least so long, to stand for a large model")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    it = Training(device)
    if options.checkpoint.exists():
        it.load(torch.load(options.checkpoint, map_location=device))
        print(f"resumed from step {it.done - 1}", flush=True)
    with session() as run:
        for attempt in run.attempts():
            with attempt:
                train(it, run, options)
    print(f"ended after step {it.done - 1}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
