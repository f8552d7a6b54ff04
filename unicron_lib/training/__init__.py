"""The trainer: Megatron-core parts in a loop of our own."""
