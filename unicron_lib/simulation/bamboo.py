"""Bamboo (NSDI'23): each node computes its successor's layers, too, and takes over when that one is lost.

The artifact of Oobleck has it spend 0.80 of a step on redundant work, which leaves 0.20 of Megatron's speed: near the 0.22
that is fitted here. The iteration in which a node is lost takes 1.5 times as long.
"""

from unicron_lib.simulation.elastic import GPT2, GPT3_2_7B, GPT3_6_7B, Elastic
from unicron_lib.simulation.habits import EachByItself

BAMBOO = EachByItself(
    habit=Elastic(
        name="bamboo",
        failure_free=0.22,
        reconfiguration_s={GPT2: 80.0, GPT3_2_7B: 230.0, GPT3_6_7B: 450.0},
        redo_iterations=1.5 - 1,
    )
)
