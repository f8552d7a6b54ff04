"""Achieved FLOP/s by Megatron's formula."""

from unicron_lib.domain.jobs import JobSpec


def iteration_flops(spec: JobSpec) -> float:
    """FLOP of one iteration of the whole job, forward and backward, activations kept.

    Megatron's formula (Narayanan et al. 2021, equation 3) counts 96 for four passes through the layers, one of which
    recomputes activations; ours has three, so 72 for the layers, and the logits' share of the whole does not change.
    """
    batch, seq, layers = spec.global_batch_size, spec.seq_length, spec.num_layers
    hidden, vocab = spec.hidden_size, spec.vocab_size
    return 72.0 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
