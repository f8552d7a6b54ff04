"""A tiny character GPT with DistributedDataParallel, in the manner of nanoGPT: torch only, on CPUs or GPUs.

    torchrun --nproc-per-node 2 train.py        or under Unicron: unicron submit ddp.yaml

It saves every few steps and resumes by itself, on any number of ranks. Unicron needs the four lines with `run` in them to see
progress; without them, a crash would be healed as well.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unicron_lib.training.session import session

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


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In one piece: who dies while saving leaves the checkpoint before."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        partial.replace(path)
    dist.barrier()


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
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    model = DistributedDataParallel(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
        print(f"resumed from step {saved['step']} on {dist.get_world_size()} ranks", flush=True)
    with session() as run:
        for step in range(first, options.steps):
            began = time.monotonic()
            tokens = batch(step, options.batch_size, device)
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, options.pace_s - (time.monotonic() - began)))
            run.step(step, loss=loss.item())
            if run.should_stop or (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                with run.section("checkpoint"):
                    save(options.checkpoint, step, model, optimizer)
            first = step + 1
            if run.should_stop:
                break
    print(f"ended after step {first - 1}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
