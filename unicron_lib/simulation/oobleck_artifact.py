"""The averages of three systems in Oobleck's published artifact (SOSP'23): 30 nodes become 15, one is lost every 10 minutes.

The rules, the trace and the measured tables of throughput are the artifact's, the code is ours (`artifact_replay`,
`artifact_systems`). All five averages come out as published. They say what that artifact computes, oddities and all, and
nothing of how the systems would do: GPT-3 6.7B gives Varuna 0.26 samples a second since two iterations count out of 23.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from unicron_lib.simulation.artifact_replay import Model, Replay
from unicron_lib.simulation.artifact_systems import Bamboo, BambooModel, Oobleck, Varuna, VarunaModel

MOST_NODES, FEWEST_NODES = 30, 15
LOST = (5, 21, 20, 15, 1, 17, 30, 28, 22, 16, 23, 12, 13, 25, 9)
"""The nodes, in the order in which they are lost."""
GAP_MS = 601_200
"""From one loss to the next: the 10 minutes of the artifact's trace."""

PUBLISHED: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("bert-large", "bamboo"): 69.84,
        ("bert-large", "varuna"): 173.52,
        ("bert-large", "oobleck"): 282.11,
        ("gpt-3-6.7b", "varuna"): 0.26,
        ("gpt-3-6.7b", "oobleck"): 3.55,
    }
)
"""Samples a second, averaged over the trace."""

_SYSTEMS: Mapping[str, type[Replay]] = MappingProxyType({"bamboo": Bamboo, "varuna": Varuna, "oobleck": Oobleck})
_BAMBOO_ON_BERT = BambooModel(
    samples=8192,
    throughput=(119.2546584, *[99.37888199] * 6, *[74.53416149] * 6, *[49.68944099] * 3),
    meet_ms=30_000,
    balance_ms=76_000,
)
_VARUNA_ON_BERT = VarunaModel(
    samples=8192,
    throughput=(
        *(343.1328746, 331.6951121, 329.5800552, 326.5438348, 306.0386227, 298.3794267, 290.038974, 280.0744467),
        *(267.8972968, 255.720147, 243.5429971, 232.9541711, 222.3653452, 211.7765192, 202.5688445, 193.3611697),
    ),
    meet_ms=76_000 - 15_800,
    restart_ms=(
        *(71_300, 67_600, 67_600, 49_100, 112_000, 108_300, 104_600, 100_900),
        *(97_200, 93_500, 89_800, 86_100, 82_400, 78_700, 75_000, 71_300),
    ),
    checkpoint_ms=15_800,
)
_OOBLECK_ON_BERT = Model(
    samples=8192,
    throughput=(
        *(368.2457947, 362.2151579, 328.35419, 327.7784909, 329.1392983, 307.2134406, 304.4540075, 278.5264442),
        *(285.8442276, 260.3144683, 261.6788898, 243.5568988, 228.0545262, 209.2082907, 214.8045205, 192.304776),
    ),
    meet_ms=2_000,
)
_VARUNA_ON_GPT_3 = VarunaModel(
    samples=1024,
    throughput=(*[5.240635953] * 3, *[5.096885803] * 4, *[4.503390788] * 4, *[3.953767179] * 4, 3.016421755),
    meet_ms=701_000 - 120_000,
    restart_ms=(701_000,) * 16,
    checkpoint_ms=120_000,
)
_OOBLECK_ON_GPT_3 = Model(
    samples=1024,
    throughput=(
        *(5.507784136, 5.324191332, 5.140598527, 4.957005722, 4.773412918, 4.808826127, 4.329925297, 4.185194343),
        *(3.947198754, 4.010855553, 4.15443025, 3.71233106, 3.593275995, 3.283996229, 3.530908551),
    ),
    meet_ms=10_000,
)
MODELS: Mapping[tuple[str, str], Model] = MappingProxyType(
    {
        ("bert-large", "bamboo"): _BAMBOO_ON_BERT,
        ("bert-large", "varuna"): _VARUNA_ON_BERT,
        ("bert-large", "oobleck"): _OOBLECK_ON_BERT,
        ("gpt-3-6.7b", "varuna"): _VARUNA_ON_GPT_3,
        ("gpt-3-6.7b", "oobleck"): _OOBLECK_ON_GPT_3,
    }
)
"""By model and system. The fewest nodes are reached with the last loss, which ends the trace."""


def trace(gap_ms: int = GAP_MS) -> tuple[tuple[int, int], ...]:
    """When which node is lost, if one is every `gap_ms`."""
    return tuple((gap_ms * number, node) for number, node in enumerate(LOST, start=1))


def average(model: str, system: str, losses: Sequence[tuple[int, int]]) -> float:
    """Samples a second that are kept, as the artifact averages them. Raises KeyError where it has none."""
    return _SYSTEMS[system](model=MODELS[model, system], losses=losses, most_nodes=MOST_NODES).average()
