"""A configured run whose clips share rows is proven against clips by themselves; what mixes clips up is found."""

from dataclasses import dataclass
from typing import Any

import pytest

from opensora_accel import Plan
from opensora_accel.attention.slices import AttentionSlices, Slice, deal
from opensora_accel.training.tiny_run import proof_of
from opensora_accel.verify import verify
from opensora_accel.verify.communication.record_step import record_step
from tests.tiers import PROVE, some
from tests.training.test_rows import FAMILIES, rows_config
from tests.verify.defects import Patch


@dataclass(frozen=True)
class Everywhere:
    """A step with a defect on all ranks and on the single device too, as a mistake in the code would be."""

    step: Any
    change: Patch

    def __call__(self, run):
        with self.change.applied():
            return self.step(run)


def seen_by_all(original, packed, queries, keys):
    """A clip sees the others of its row, and their captions."""
    seen = original(packed, queries, keys)
    return None if seen is None else AttentionSlices.full(seen.num_queries, seen.num_keys)


def a_token_too_many(original, packed, queries, keys):
    """The first clip sees a token of its neighbour, of whatever the second one sees."""
    seen = original(packed, queries, keys)
    if seen is None or len(seen.slices) < 2:
        return seen
    first, second, *others = seen.slices
    more = first._replace(k_stop=first.k_stop + 1)
    return AttentionSlices(
        seen.num_queries, seen.num_keys, (Slice.of(more.queries, more.keys), second, *others)
    )


def captions_of_the_neighbour(original, packed, queries, keys):
    """Clips see the caption of the clip before them; of two of equal length nothing else would show it."""
    seen = original(packed, queries, keys)
    if seen is None or queries == keys or len(seen.slices) < 2:
        return seen
    own = [each.keys for each in seen.slices]
    pairs = zip(seen.slices, own[-1:] + own[:-1], strict=True)
    return AttentionSlices(
        seen.num_queries, seen.num_keys, tuple(Slice.of(each.queries, before) for each, before in pairs)
    )


def positions_of_others(original, model, entry, samples):
    """Clips of unlike lengths have each other's positions.

    Positions that go on from clip to clip are no defect of this model: rotary embeddings are relative.
    """
    lengths, _positions = original(model, entry, samples)
    _lengths, positions = original(model, entry, samples[::-1])
    return lengths, positions


def times_of_the_neighbour(original, model, calls):
    """The first token of each clip has the time of the clip before."""
    row, streams = original(model, calls)
    return row | {"timestep": row["timestep"].roll(1, 1)}, streams


BETWEEN = "shardformer.spread.streams:Packed.between"
DEFECTS = {
    "all clips are seen": Patch(BETWEEN, seen_by_all),
    "a token of the neighbour is seen": Patch(BETWEEN, a_token_too_many),
    "captions of the neighbour": Patch(BETWEEN, captions_of_the_neighbour),
    "positions of others": Patch("shardformer.engine.packed:_of_grids", positions_of_others),
    "times of the neighbour": Patch("opensora_accel.training.recipes.wan:_join", times_of_the_neighbour),
}


def proof(folder, name="WanTransformer3DModel", plan=None):
    return proof_of(rows_config(name, folder, folder / "run", plan), folder, 4)


@PROVE
@pytest.mark.parametrize("plan", some([Plan(ring=2), Plan(dp_replicate=2, ulysses=2), Plan(ring=3)]), ids=str)
@pytest.mark.parametrize("name", some(FAMILIES, "WanTransformer3DModel"))
def test_rows_are_proven_against_clips_by_themselves(ranks, tmp_path, name, plan):
    asked = proof(tmp_path, name)
    report = verify(asked.step, None, [plan.replace(precision="fp64")], reference="whole", pool=ranks)
    assert report.ok, report
    assert len(asked.step.config.data.buckets) == 2 and asked.step.config.data.packed_tokens >= 277


@PROVE
@pytest.mark.parametrize("name", some(DEFECTS, "a token of the neighbour is seen", "positions of others"))
def test_what_mixes_clips_up_is_found(ranks, tmp_path, name):
    """Also where the tokens of no clip are spread: the single device has clips by themselves."""
    step = Everywhere(proof(tmp_path).step, DEFECTS[name])
    report = verify(step, None, [Plan(dp_replicate=2, precision="fp64")], reference="whole", pool=ranks)
    assert not report.ok
    assert not any(mesh.errors for mesh in report.results), report
    (finding, *_) = report.findings
    assert finding.kind == "values" and len(report.results) == 1, report


@PROVE
def test_the_list_of_the_true_run_is_of_the_fullest_row(tmp_path):
    """Dealt out over the ring: two rows a step, of two layers each, and what others see of its keys."""
    asked = proof(tmp_path, plan=Plan(ring=3))
    record = record_step(asked.true_step, asked.true_model_fn, asked.world, ranks=[0, 1, 2])
    dealt = deal(AttentionSlices.packed([135, 75, 15, 15]), 3)
    for rank in record.ranks:
        sent = sum(2 * step.num_sent + step.num_received for step in dealt.steps(rank.rank))
        found = sum(call.sent_bytes for call in rank.calls if call.kind == "send")
        assert found == 2 * 2 * 2 * 4 * 36 * sent  # rows, layers, keys and values, bytes, channels
