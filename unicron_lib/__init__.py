"""Unicron: a self-healing workload manager for concurrent LLM training."""
