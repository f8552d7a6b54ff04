"""A Trainer with callbacks in the manner of Hugging Face's, of which Unicron is one. Needs torch only.

torchrun --nproc-per-node 2 train.py        or under Unicron: unicron submit hf-style.yaml
"""

import argparse
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unicron_lib.training.session import Session, session


class UnicronCallback:
    """To be used with any trainer that calls its callbacks as `transformers.Trainer` does."""

    def __init__(self, run: Session) -> None:
        self._run = run
        self._saving = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self._run.step(state.global_step - 1, loss=losses[-1] if losses else None)
        if self._run.should_stop:
            control.should_save = control.should_training_stop = True
        if control.should_save:
            self._saving.enter_context(self._run.section("checkpoint"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saving.close()


# --- from here on: what transformers would bring -----------------------------------------------------------------------


@dataclass
class TrainerState:
    global_step: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class TrainerControl:
    should_save: bool = False
    should_training_stop: bool = False


class Trainer:
    def __init__(self, model: nn.Module, args: argparse.Namespace, callbacks: list[UnicronCallback]) -> None:
        self.args, self.callbacks = args, callbacks
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state, self.control = TrainerState(), TrainerControl()

    def train(self, resume_from_checkpoint: Path | None) -> None:
        if resume_from_checkpoint:
            saved = torch.load(resume_from_checkpoint / "state.pt")
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state.global_step = saved["global_step"]
            print(f"resumed from step {self.state.global_step}", flush=True)
        while self.state.global_step < self.args.max_steps and not self.control.should_training_stop:
            loss = self.training_step()
            self.state.global_step += 1
            self.state.log_history.append({"loss": loss})
            is_last = self.state.global_step == self.args.max_steps
            self.control.should_save = is_last or self.state.global_step % self.args.save_steps == 0
            for callback in self.callbacks:
                callback.on_step_end(self.args, self.state, self.control)
            if self.control.should_save:
                self.save()

    def training_step(self) -> float:
        order = torch.Generator().manual_seed(self.state.global_step)
        inputs = torch.randn(16, 8, generator=order)[dist.get_rank() :: dist.get_world_size()]
        loss = nn.functional.mse_loss(self.model(inputs), inputs.sum(dim=1, keepdim=True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self) -> None:
        if dist.get_rank() == 0:
            target = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            weights = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**weights, "global_step": self.state.global_step}, partial / "state.pt")
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        dist.barrier()
        for callback in self.callbacks:
            callback.on_save(self.args, self.state, self.control)


def get_last_checkpoint(output_dir: str) -> Path | None:
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="output")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    with session() as run:
        Trainer(model, args, callbacks=[UnicronCallback(run)]).train(get_last_checkpoint(args.output_dir))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
