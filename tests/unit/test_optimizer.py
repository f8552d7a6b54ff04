"""The optimizer is torch's AdamW with Megatron's schedule."""

import pytest
import torch

from unicron_lib.checkpointing.tensors import unpack
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.flops import iteration_flops
from unicron_lib.training.optimizer import AdamW, clip, learning_rate
from unicron_lib.training.shards import own_share, to_bytes


def test_steps_are_those_of_torchs_adamw() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(10, dtype=torch.float64, generator=generator)
    ours = start.clone()
    decayed, plain = (torch.nn.Parameter(part.clone()) for part in start.split([6, 4]))
    theirs = torch.optim.AdamW([{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0}], lr=0.01)
    adam = AdamW(ours, num_decayed=6, weight_decay=0.1)
    for iteration in range(5):
        gradient = torch.randn(10, dtype=torch.float64, generator=generator)
        decayed.grad, plain.grad = gradient[:6].clone(), gradient[6:].clone()
        theirs.step()
        adam.step(gradient, lr=0.01, iteration=iteration)
    torch.testing.assert_close(ours, torch.cat([decayed, plain]).detach(), rtol=1e-12, atol=1e-12)


def test_the_learning_rate_warms_up_and_falls_to_its_minimum() -> None:
    spec = JobSpec(job="a", lr=1.0, min_lr=0.1, lr_warmup_iters=4, train_iters=104)
    rates = [learning_rate(spec, iteration) for iteration in range(105)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_clipping_scales_to_the_norm() -> None:
    gradient = torch.tensor([3.0, 4.0])
    clip(gradient, norm=5.0, clip_grad=0.0)
    assert gradient.tolist() == [3.0, 4.0]
    clip(gradient, norm=5.0, clip_grad=1.0)
    assert float(gradient.norm()) == pytest.approx(1.0)
    clip(gradient, norm=1.0, clip_grad=2.0)
    assert float(gradient.norm()) == pytest.approx(1.0)


def test_flops_are_megatrons_but_for_the_recomputation() -> None:
    """175B of the paper: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation."""
    spec = JobSpec(
        job="a",
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        seq_length=2048,
        vocab_size=51200,
        global_batch_size=1536,
    )
    layers = 1536 * 2048 * 96 * 12288**2
    with_recomputation = 96 * layers * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    forward_of_layers = 24 * layers * (1 + 2048 / (6 * 12288))
    assert iteration_flops(spec) == pytest.approx(with_recomputation - forward_of_layers)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_tensor_is_saved_by_one_rank(world_size: int) -> None:
    state = {f"t{size}": torch.zeros(size) for size in (100, 50, 50, 30, 20, 10, 5)}
    shares = [own_share(state, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(name for part in shares for name in part) == sorted(state)
    assert all(shares)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_to_be_uploaded_keeps_its_values(*, again: bool) -> None:
    """PB37: also in memory that is used again."""
    tensor = torch.ones(1000)
    into = to_bytes({"t": torch.zeros(1000)}) if again else None
    copy = to_bytes({"t": tensor}, into)
    assert (copy is into) is again
    tensor.fill_(2.0)
    assert bool((unpack(copy, "a")["t"] == 1.0).all())
