"""Oobleck (SOSP'23): pipelines of planned sizes; a lost node's pipeline is replaced from the replicas of its layers."""

from unicron_lib.simulation.elastic import GPT2, GPT3_2_7B, GPT3_6_7B, Elastic
from unicron_lib.simulation.habits import EachByItself

OOBLECK = EachByItself(
    habit=Elastic(name="oobleck", failure_free=0.27, reconfiguration_s={GPT2: 2.0, GPT3_2_7B: 6.0, GPT3_6_7B: 10.0})
)
