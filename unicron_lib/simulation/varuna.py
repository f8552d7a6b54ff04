"""Varuna (EuroSys'22): checkpoints every few iterations, morphs to another layout from the newest one after a preemption.

Its fitted speed includes the time for its checkpoints, every 10 iterations.
"""

from unicron_lib.simulation.elastic import GPT2, GPT3_2_7B, GPT3_6_7B, Elastic
from unicron_lib.simulation.habits import EachByItself

SAVED_EVERY = 10
"""Iterations from one checkpoint to the next in Oobleck's artifact."""

VARUNA = EachByItself(
    habit=Elastic(
        name="varuna",
        failure_free=0.21,
        reconfiguration_s={GPT2: 83.0, GPT3_2_7B: 515.0, GPT3_6_7B: 701.0},
        wait_s=120.0,
        redo_iterations=SAVED_EVERY / 2,
    )
)
