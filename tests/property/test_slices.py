"""Any layout's slices make up the whole tensors, and any other layout can be put together from them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore

from unicron_lib.checkpointing.manifest import Manifest, Shard, format_of, parse_manifest
from unicron_lib.checkpointing.model_state import of_the_state, owned_at, parameters, slices_at, why_unloadable
from unicron_lib.checkpointing.repository import CheckpointRepository
from unicron_lib.checkpointing.slices import TensorSlice, are_apart, covered
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.training.shards import needed, own_share, read_slices, read_state, to_bytes


@st.composite
def jobs_and_layouts(draw: st.DrawFn, count: int = 2) -> tuple[JobSpec, list[Layout]]:
    heads, layers = draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([1, 2, 4, 6]))
    spec = JobSpec(job="a", num_layers=layers, hidden_size=2 * heads, num_attention_heads=heads, seq_length=3, vocab_size=264)
    of = lambda number: st.sampled_from([it for it in range(1, number + 1) if number % it == 0])  # noqa: E731
    layouts = st.builds(Layout, tp=of(heads), pp=of(layers), dp=st.integers(1, 3))
    return spec, draw(st.lists(layouts, min_size=count, max_size=count))


def whole(spec: JobSpec) -> dict[str, torch.Tensor]:
    shapes = of_the_state({it.name: TensorSlice.all_of(it.shape) for it in parameters(spec)})
    random = torch.Generator().manual_seed(spec.num_layers)
    return {name: torch.rand(it.whole, dtype=torch.float64, generator=random) for name, it in shapes.items()}


def part(state: dict[str, torch.Tensor], slices: dict[str, TensorSlice]) -> dict[str, torch.Tensor]:
    return {name: state[name][it.within(TensorSlice.all_of(it.whole))] for name, it in slices.items()}


def save(repository: CheckpointRepository, spec: JobSpec, layout: Layout, state: dict[str, torch.Tensor]) -> Manifest:
    """As the ranks of a generation do it."""
    shards: list[Shard] = []
    for rank in range(layout.num_gpus):
        place = layout.place(rank)
        slices = of_the_state(slices_at(spec, layout, place))
        owned = {name: it for name, it in slices.items() if name.partition(".")[2] in owned_at(spec, layout, place)}
        mine = own_share(part(state, owned), rank=place.dp, world_size=layout.dp)
        shards.append(
            repository.put_shard(
                iteration=3,
                generation=1,
                save="all",
                rank=rank,
                data=to_bytes(mine),
                tensors=tuple(mine),
                slices={name: slices[name] for name in mine} if layout.replica_size > 1 else {},
            )
        )
    manifest = Manifest(
        job=spec.job,
        generation=1,
        iteration=3,
        loss=1.0,
        consumed_samples=8,
        layout=layout,
        shards=tuple(shards),
        format=format_of(shards),
    )
    repository.commit(manifest)
    return repository.load_manifest(manifest.key)


@settings(max_examples=25, deadline=None)
@given(jobs_and_layouts())
def test_what_one_layout_has_saved_any_other_one_loads(drawn: tuple[JobSpec, list[Layout]]) -> None:
    spec, (one, other) = drawn
    store, state = MemoryStore(), whole(spec)
    repository = CheckpointRepository(store, spec.job)
    manifest = save(repository, spec, one, state)
    assert why_unloadable(manifest, spec) is None
    for rank in range(other.replica_size):
        wanted = of_the_state(slices_at(spec, other, other.place(rank)))
        found = read_slices(repository, manifest, wanted)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in part(state, wanted).items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in read_state(repository, manifest).items())


@settings(max_examples=100, deadline=None)
@given(jobs_and_layouts(1))
def test_each_element_is_owned_once_and_a_rank_in_its_own_layout_reads_its_column_s_shards(
    drawn: tuple[JobSpec, list[Layout]],
) -> None:
    spec, (layout,) = drawn
    places = [layout.place(rank) for rank in range(layout.replica_size)]
    pieces: dict[str, list[TensorSlice]] = {}
    for place in places:
        here = slices_at(spec, layout, place)
        for name in owned_at(spec, layout, place):
            pieces.setdefault(name, []).append(here[name])
    for it in parameters(spec):
        assert are_apart(pieces[it.name])
        assert covered(TensorSlice.all_of(it.shape), pieces[it.name]) == TensorSlice.all_of(it.shape).num_elements


def test_a_rank_reads_no_shards_that_have_nothing_for_it() -> None:
    spec = JobSpec(job="a", num_layers=4, hidden_size=8, num_attention_heads=4)
    layout = Layout(tp=2, pp=4)
    repository = CheckpointRepository(MemoryStore(), "a")
    manifest = save(repository, spec, layout, whole(spec))

    def reads(of: Layout, rank: int) -> list[int]:
        chosen = needed(manifest.shards, of_the_state(slices_at(spec, of, of.place(rank))))
        return [number for number, shard in enumerate(manifest.shards) if shard in chosen]

    # uncut tensors are the first rank's of each stage; the last stage has the first one's embedding
    assert [reads(layout, rank) for rank in range(8)] == [[0], [0, 1], [2], [2, 3], [4], [4, 5], [0, 6], [1, 6, 7]]
    assert reads(Layout(tp=4, pp=2), 3) == [0, 1, 2, 3]
    assert reads(Layout(), 0) == list(range(8))


def test_another_model_is_told_from_the_manifest_alone() -> None:
    spec = JobSpec(job="a", num_layers=2, hidden_size=8, num_attention_heads=4)
    wider = JobSpec(job="a", num_layers=2, hidden_size=16, num_attention_heads=4)
    deeper = JobSpec(job="a", num_layers=4, hidden_size=8, num_attention_heads=4)
    for layout, knows_shapes in ((Layout(tp=2), True), (Layout(dp=2), False)):
        manifest = save(CheckpointRepository(MemoryStore(), "a"), spec, layout, whole(spec))
        assert why_unloadable(manifest, spec) is None
        assert "it is of another model, 72 tensors differ" in str(why_unloadable(manifest, deeper))
        assert bool(why_unloadable(manifest, wider)) == knows_shapes
    lacking = Manifest(**{it: getattr(manifest, it) for it in manifest.__slots__} | {"shards": manifest.shards[:1]})
    assert "tensors differ" in str(why_unloadable(lacking, spec))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_two_slices_have_in_common_is_what_is_in_both(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    one, other = (data.draw(slice_in(shape)) for _ in range(2))
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    everything = TensorSlice.all_of(shape)
    first, second = numbers[one.within(everything)], numbers[other.within(everything)]
    common = one.meet(other)
    both = set(first.flatten().tolist()) & set(second.flatten().tolist())
    assert (common.num_elements if common else 0) == len(both)
    if common:
        assert torch.equal(first[common.within(one)], second[common.within(other)])
        assert set(first[common.within(one)].flatten().tolist()) == both


@st.composite
def slice_in(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorSlice:
    offset = tuple(draw(st.integers(0, side - 1)) for side in shape)
    size = tuple(draw(st.integers(1, side - first)) for side, first in zip(shape, offset, strict=True))
    return TensorSlice(whole=shape, offset=offset, size=size)


def test_manifests_of_slices_are_read_as_they_were_written() -> None:
    spec = JobSpec(job="a", num_layers=2, hidden_size=8, num_attention_heads=4)
    store = MemoryStore()
    manifest = save(CheckpointRepository(store, "a"), spec, Layout(tp=2, pp=2), whole(spec))
    assert parse_manifest(store.get(manifest.key)) == manifest
    assert manifest.format == 2
