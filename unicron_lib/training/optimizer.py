"""AdamW over one flat buffer, with Megatron's learning rate schedule."""

import math

import torch

from unicron_lib.domain.jobs import JobSpec

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Megatron's defaults."""


def learning_rate(spec: JobSpec, iteration: int) -> float:
    """Linear warm-up to `lr` over `lr_warmup_iters`, then a cosine to `min_lr` at `train_iters`."""
    if iteration < spec.lr_warmup_iters:
        return spec.lr * (iteration + 1) / spec.lr_warmup_iters
    done = (iteration - spec.lr_warmup_iters) / max(1, spec.train_iters - spec.lr_warmup_iters)
    return spec.min_lr + 0.5 * (spec.lr - spec.min_lr) * (1.0 + math.cos(math.pi * min(1.0, done)))


class AdamW:
    """Decoupled weight decay on the first `num_decayed` elements of `parameters` (megatron spares biases and norms).

    The number of the step is the iteration's, so that the moments are all there is to save.
    """

    def __init__(self, parameters: torch.Tensor, *, num_decayed: int, weight_decay: float) -> None:
        self._parameters = parameters
        self._decayed = parameters[:num_decayed]
        self._weight_decay = weight_decay
        self.exp_avg = torch.zeros_like(parameters)
        self.exp_avg_sq = torch.zeros_like(parameters)

    def step(self, gradient: torch.Tensor, *, lr: float, iteration: int) -> None:
        """Apply `gradient` as the step of `iteration` (0-based)."""
        self._decayed.mul_(1.0 - lr * self._weight_decay)
        self.exp_avg.lerp_(gradient, 1.0 - BETA1)
        self.exp_avg_sq.mul_(BETA2).addcmul_(gradient, gradient, value=1.0 - BETA2)
        correction1 = 1.0 - BETA1 ** (iteration + 1)
        correction2 = 1.0 - BETA2 ** (iteration + 1)
        denominator = (self.exp_avg_sq / correction2).sqrt_().add_(EPS)
        self._parameters.addcdiv_(self.exp_avg, denominator, value=-lr / correction1)


def clip(gradient: torch.Tensor, *, norm: float, clip_grad: float) -> None:
    """Scale `gradient`, whose L2 norm is `norm`, down to `clip_grad`; 0 or less leaves it."""
    if clip_grad > 0 and norm > clip_grad:
        gradient.mul_(clip_grad / (norm + 1e-6))
