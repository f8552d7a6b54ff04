"""The systems that Unicron is compared with, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from unicron_lib.simulation.bamboo import BAMBOO
from unicron_lib.simulation.gemini import CHECKPOINT_ONLY, GEMINI
from unicron_lib.simulation.megatron import MEGATRON, SHRINKING, with_spare_nodes
from unicron_lib.simulation.oobleck import OOBLECK
from unicron_lib.simulation.policy import Policy
from unicron_lib.simulation.shared_out import EQUALLY, SIZED, WEIGHTED
from unicron_lib.simulation.varuna import VARUNA

_SYSTEMS = (MEGATRON, SHRINKING, with_spare_nodes(1, 8), OOBLECK, BAMBOO, VARUNA, GEMINI, CHECKPOINT_ONLY)
_ALL: tuple[Policy, ...] = (*_SYSTEMS, EQUALLY, WEIGHTED, SIZED)
BASELINES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in _ALL})
PAPER = ("megatron", "oobleck", "bamboo", "varuna")
"""Those of the Unicron paper."""
