"""Throughput, value, allocation, placement and transition: pure functions from state to plan."""
