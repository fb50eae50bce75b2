"""Locality against plain Python on small traces, and known answers."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from small import DECODED, MASKED, PAD, PROMPT, diffusion, geometry, manifest, record, routes

from oled.trace import ForwardRecord, Phase, trace_of_records
from oled.trace.stats import locality, locality_lines
from oled.trace.stats.estimate import ratio, spearman

SHAPE = geometry([8, 12, 10])


@pytest.fixture(scope="module")
def records() -> list[ForwardRecord]:
    return diffusion(SHAPE, requests=3, blocks=3, seed=5, interleaved=True)


@pytest.fixture(scope="module")
def found(records: list[ForwardRecord]):
    return locality(trace_of_records(manifest(SHAPE), records))


def active(one: ForwardRecord, place: int) -> set[int]:
    return set(one.expert_ids[place].ravel().tolist())


def chains(records: list[ForwardRecord]) -> dict[tuple[int, int], list[ForwardRecord]]:
    result = defaultdict(list)
    for one in records:
        if one.phase is Phase.DENOISE:
            result[one.request, one.block].append(one)
    return result


@pytest.mark.parametrize("gap", [1, 2, 3])
def test_overlap_by_gap(records, found, gap: int) -> None:
    of_new, of_old, jaccard, chance, cosine = [], [], [], [], []
    for chain in chains(records).values():
        for old, new in zip(chain, chain[gap:], strict=False):
            for place, experts in enumerate(SHAPE.experts_per_layer):
                a, b = active(old, place), active(new, place)
                of_new.append(len(a & b) / len(b))
                of_old.append(len(a & b) / len(a))
                jaccard.append(len(a & b) / len(a | b))
                chance.append(len(a) / experts)
                counts = [
                    np.bincount(one.expert_ids[place].ravel(), minlength=experts)
                    for one in (old, new)
                ]
                norms = np.linalg.norm(counts[0]) * np.linalg.norm(counts[1])
                cosine.append(counts[0] @ counts[1] / norms)
    overlap = found.overlap[gap]
    assert overlap.pairs == len(of_new)
    assert overlap.of_new.value == pytest.approx(np.mean(of_new))
    assert overlap.of_old.value == pytest.approx(np.mean(of_old))
    assert overlap.jaccard.value == pytest.approx(np.mean(jaccard))
    assert overlap.chance_of_new == pytest.approx(np.mean(chance))
    assert overlap.cosine.value == pytest.approx(np.mean(cosine))
    if gap == 1:
        by_layer = np.reshape(of_new, (-1, 3)).mean(axis=0)
        np.testing.assert_allclose(found.adjacent_by_layer.of_new, by_layer)


def test_boundaries_with_and_without_the_commit(records, found) -> None:
    for side, phases in (
        (found.boundary.after_denoise, {Phase.DENOISE}),
        (found.boundary.after_commit, {Phase.DENOISE, Phase.COMMIT}),
    ):
        of_new, of_old = [], []
        for request in range(3):
            for block in range(2):
                old = [
                    one
                    for one in records
                    if (one.request, one.block) == (request, block) and one.phase in phases
                ][-1]
                new = chains(records)[request, block + 1][0]
                for place in range(3):
                    a, b = active(old, place), active(new, place)
                    of_new.append(len(a & b) / len(b))
                    of_old.append(len(a & b) / len(a))
        assert side.of_new.value == pytest.approx(np.mean(of_new))
        assert side.of_old.value == pytest.approx(np.mean(of_old))


def test_active_experts_and_counts(records, found) -> None:
    denoise = [one for one in records if one.phase is Phase.DENOISE]
    sizes = np.array([[len(active(one, place)) for place in range(3)] for one in denoise])
    np.testing.assert_allclose(found.active.by_layer, sizes.mean(axis=0))
    assert found.active.mean.value == pytest.approx(sizes.mean())
    assert found.active.share.value == pytest.approx((sizes / [8, 12, 10]).mean())
    assert found.active.times_one_token == pytest.approx(sizes.mean() / 2)
    assert found.forwards_per_block.value == pytest.approx(len(denoise) / 9)
    assert found.tokens_per_forward.value == pytest.approx(9 * 4 / len(denoise))


def test_persistence_by_state_and_confidence(records, found) -> None:
    seen = defaultdict(list)
    by_request: dict[int, list[ForwardRecord]] = defaultdict(list)
    for one in records:
        by_request[one.request].append(one)
    for forwards in by_request.values():
        for old, new in itertools.pairwise(forwards):
            if old.phase is not Phase.DENOISE or old.block != new.block:
                continue
            for t in range(4):
                shares = [
                    len(set(old.expert_ids[place, t]) & set(new.expert_ids[place, t])) / 2
                    for place in range(3)
                ]
                names = {MASKED: "masked", DECODED: "decoded"}
                transition = f"{names[old.state[t]]}_to_{names[new.state[t]]}"
                seen[transition].append((float(np.float32(old.confidence[t])), np.mean(shares)))
    kept = found.persistence
    assert set(kept.by_transition) == set(seen)
    for name, values in seen.items():
        confidence, share = np.array(values).T
        assert kept.by_transition[name] == pytest.approx(share.mean())
        assert kept.tokens_by_transition[name] == len(share)
        low = share[(confidence >= 0.1) & (confidence < 0.3)]
        cells = [
            cell
            for cell in kept.by_confidence_and_transition
            if (cell.transition, cell.confidence_low) == (name, 0.1)
        ]
        if len(low):
            assert cells[0].persistence == pytest.approx(low.mean())
            assert cells[0].tokens == len(low)
    every = np.concatenate([np.array(values) for values in seen.values()])
    assert kept.mean == pytest.approx(every[:, 1].mean())
    assert kept.spearman["all"] == pytest.approx(spearman(every[:, 0], every[:, 1]))
    assert sum(cell.tokens for cell in kept.by_confidence) == len(every)


def test_popularity_leaves_pads_out() -> None:
    shape = geometry(4, layers=1)
    ids = np.array([[[0, 1], [0, 2], [3, 2]]])
    one = record(ids, state=np.array([PROMPT, PROMPT, PAD]))
    popularity = locality(trace_of_records(manifest(shape), [one])).popularity
    assert popularity.sorted_shares == ((0.5, 0.25, 0.25, 0.0),)
    assert popularity.dead == (1,)
    assert popularity.entropy[0] == pytest.approx(1.5 * np.log(2) / np.log(4))


def test_autoregressive_traces_have_gaps_in_tokens() -> None:
    shape = geometry(8, layers=1)
    ids = [[0, 1], [0, 1], [0, 2], [4, 5]]
    records = [
        record([[pair]], pass_id=place, positions=np.array([place]), context=place)
        for place, pair in enumerate(ids)
    ]
    found = locality(trace_of_records(manifest(shape), records))
    assert found.chain == "decode"
    assert found.overlap[1].of_new.value == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.overlap[2].of_new.value == pytest.approx(0.5 / 2)
    assert set(found.overlap) == {1, 2, 3}
    assert found.boundary is None
    assert found.persistence is None
    # a context that starts again is another chain
    restarted = [*records[:2], *(replace(one, context=0) for one in records[2:])]
    found = locality(trace_of_records(manifest(shape), restarted))
    assert found.overlap[1].of_new.value == 1.0


def test_prefill_alone_has_popularity_only() -> None:
    ids, weights = routes(np.random.default_rng(0), SHAPE, 5)
    one = record(ids, weights, phase=Phase.PREFILL, state=np.full(5, PROMPT))
    found = locality(trace_of_records(manifest(SHAPE), [one]))
    assert found.overlap == {}
    assert found.active is None
    assert json.loads(json.dumps(found.to_json()))["overlap"] == {}
    assert locality_lines(found)


def test_json_and_text_hold_the_figures(found) -> None:
    data = json.loads(json.dumps(found.to_json()))
    assert data["overlap"]["1"]["of_new"]["value"] == round(found.overlap[1].of_new.value, 6)
    text = "\n".join(locality_lines(found))
    for words in ("gap 1", "boundary, from commit", "masked to masked", "experts without a token"):
        assert words in text


def test_intervals_are_over_requests() -> None:
    same = ratio(np.array([2.0, 4.0]), np.array([4.0, 8.0]))
    assert same is not None
    assert (same.value, same.low, same.high) == (0.5, 0.5, 0.5)
    alone = ratio(np.array([2.0, 0.0]), np.array([4.0, 0.0]))
    assert alone is not None
    assert alone.low is None
    assert ratio(np.zeros(2), np.zeros(2)) is None
    rng = np.random.default_rng(0)
    wide = ratio(rng.random(30), np.ones(30))
    assert wide is not None
    assert wide.low is not None
    assert wide.high is not None
    assert wide.low < wide.value < wide.high
    assert ratio(rng.random(30), np.ones(30)) != wide  # other data
    assert wide.high - wide.low == pytest.approx(4 * np.sqrt(1 / 12 / 30), rel=0.3)


def test_spearman() -> None:
    x = np.array([1.0, 2, 3, 4, 5])
    assert spearman(x, x**3) == pytest.approx(1)
    assert spearman(x, -x) == pytest.approx(-1)
    assert spearman(x, np.array([1.0, 3, 2, 5, 4])) == pytest.approx(0.8)
    # ties at their mean rank: ranks 1.5 1.5 3.5 3.5 5
    assert spearman(x, np.array([1.0, 1, 2, 2, 3])) == pytest.approx(0.9486833)
    assert spearman(x, np.ones(5)) is None
    assert spearman(x[:2], x[:2]) is None


def test_overlap_needs_the_order_of_forwards() -> None:
    rng = np.random.default_rng(0)
    steps = [
        record(*routes(rng, SHAPE, 2), pass_id=number, context=context)
        for number, context in enumerate((5, 9, 3, 4))  # the third pass has fewer rows
    ]
    for changes, pairs in (({}, 2), ({"lacks": ("requests",)}, 3), ({"ordered": False}, 0)):
        found = locality(trace_of_records(manifest(SHAPE, **changes), steps))
        assert sum(overlap.pairs for gap, overlap in found.overlap.items() if gap == 1) == 3 * pairs
        assert locality_lines(found)
