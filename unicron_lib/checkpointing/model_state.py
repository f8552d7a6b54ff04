"""The tensors of our trainer's state: their names and whole shapes, and what each place of a layout has of them. Pure.

Names are those of megatron's GPT model on one rank; every other layout names the same tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unicron_lib.checkpointing.manifest import Manifest
from unicron_lib.checkpointing.slices import TensorSlice, covered
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout, Place

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""What there is of each parameter: itself, and Adam's moments. A tensor's name is `kind.parameter`."""
TIED = "embedding.word_embeddings.weight"
"""The parameter that the last stage has a copy of, for the logits. The first stage saves it."""
_FFN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the whole model; `cut` is the dimension that tensor parallelism divides, None if it does not."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    first: bool = False
    last: bool = False
    layer: int | None = None

    def is_at(self, stage: int, *, num_stages: int, num_layers: int) -> bool:
        """Whether a pipeline stage computes with it."""
        if self.layer is not None:
            return self.layer // (num_layers // num_stages) == stage
        return (self.first and stage == 0) or (self.last and stage == num_stages - 1)


def parameters(spec: JobSpec) -> tuple[Parameter, ...]:
    """All parameters of the job's model."""
    hidden = spec.hidden_size
    ends = (
        Parameter(name=TIED, shape=(spec.vocab_size, hidden), cut=0, first=True, last=True),
        Parameter(name="embedding.position_embeddings.weight", shape=(spec.seq_length, hidden), cut=None, first=True),
        *(Parameter(name=f"decoder.final_layernorm.{it}", shape=(hidden,), cut=None, last=True) for it in ("weight", "bias")),
    )
    layers = (
        Parameter(name=f"decoder.layers.{layer}.{name}", shape=shape, cut=cut, layer=layer)
        for layer in range(spec.num_layers)
        for name, shape, cut in _of_a_layer(hidden)
    )
    return (*ends, *layers)


def _of_a_layer(hidden: int) -> tuple[tuple[str, tuple[int, ...], int | None], ...]:
    return (
        ("input_layernorm.weight", (hidden,), None),
        ("input_layernorm.bias", (hidden,), None),
        ("self_attention.linear_qkv.weight", (3 * hidden, hidden), 0),
        ("self_attention.linear_qkv.bias", (3 * hidden,), 0),
        ("self_attention.linear_proj.weight", (hidden, hidden), 1),
        ("self_attention.linear_proj.bias", (hidden,), None),
        ("pre_mlp_layernorm.weight", (hidden,), None),
        ("pre_mlp_layernorm.bias", (hidden,), None),
        ("mlp.linear_fc1.weight", (_FFN * hidden, hidden), 0),
        ("mlp.linear_fc1.bias", (_FFN * hidden,), 0),
        ("mlp.linear_fc2.weight", (hidden, _FFN * hidden), 1),
        ("mlp.linear_fc2.bias", (hidden,), None),
    )


def slices_at(spec: JobSpec, layout: Layout, place: Place) -> dict[str, TensorSlice]:
    """What the parameters of a place are, by name."""
    return {it.name: _slice_of(it, layout, place) for it in parameters(spec) if _is_at(it, spec, layout, place)}


def owned_at(spec: JobSpec, layout: Layout, place: Place) -> frozenset[str]:
    """The parameters that count at a place: each element of the model does at exactly one place of a replica."""
    here = [it for it in parameters(spec) if _is_at(it, spec, layout, place)]
    return frozenset(
        it.name for it in here if (it.cut is not None or place.tp == 0) and (not (it.first and it.last) or place.pp == 0)
    )


def _is_at(parameter: Parameter, spec: JobSpec, layout: Layout, place: Place) -> bool:
    return parameter.is_at(place.pp, num_stages=layout.pp, num_layers=spec.num_layers)


def _slice_of(parameter: Parameter, layout: Layout, place: Place) -> TensorSlice:
    if parameter.cut is None:
        return TensorSlice.all_of(parameter.shape)
    return TensorSlice.part_of(parameter.shape, dim=parameter.cut, number=place.tp, of=layout.tp)


def of_the_state(slices: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """The tensors of a state, given its parameters."""
    return {f"{kind}.{name}": piece for kind in KINDS for name, piece in slices.items()}


def why_unloadable(manifest: Manifest, spec: JobSpec) -> str | None:
    """Why a checkpoint cannot be loaded into the job's model, in whatever layout; None if it can.

    A manifest of format 1 tells names only: the shapes show when its shards are read.
    """
    wanted = of_the_state({it.name: TensorSlice.all_of(it.shape) for it in parameters(spec)})
    there: dict[str, list[TensorSlice]] = {}
    for shard in manifest.shards:
        for name in shard.tensors:
            there.setdefault(name, []).extend([shard.slices[name]] if name in shard.slices else [])
    wrong = sorted(wanted.keys() ^ there.keys())
    if manifest.format > 1:
        wrong += [name for name in wanted if covered(wanted[name], there.get(name, ())) != wanted[name].num_elements]
    if not wrong:
        return None
    return f"it is of another model, {len(set(wrong))} tensors differ, the first is {wrong[0]}"
