"""From a trace to its `Locality`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oled.trace.drafts import Verifications, undrafted
from oled.trace.manifest import Manifest
from oled.trace.reader import load
from oled.trace.schema import NO_EXPERT, Phase, TokenState
from oled.trace.stats.estimate import Estimate, means_of, ratio
from oled.trace.stats.locality import (
    Active,
    Boundary,
    LayerOverlap,
    Locality,
    Overlap,
    Popularity,
)
from oled.trace.stats.persistence import persistence
from oled.trace.steps import LayerPairs, Steps, build_steps
from oled.trace.tables import Trace
from oled.types import Doubles, Ints

GAPS = range(1, 8)
AFTER_DENOISE, AFTER_COMMIT = len(GAPS), len(GAPS) + 1  # slots behind those of the gaps


def stats(path: str | Path) -> Locality:
    """Return the locality of a trace folder."""
    return locality(load(path))


def locality(trace: Trace) -> Locality:
    """Measure overlap, boundaries, active experts, persistence and popularity of a trace.

    Of one with drafts: of what plain decoding would have recorded.
    """
    drafts = Verifications.of(trace)
    if drafts is not None:
        trace = undrafted(trace)
    steps = build_steps(trace)
    chains = _Chains.of(steps, trace.manifest)
    sums = _set_sums(steps, chains)
    gaps = {gap: _overlap(sums[:, place]) for place, gap in enumerate(GAPS)}
    denoise = chains.phase is Phase.DENOISE
    return Locality(
        path=str(trace.path),
        hash=trace.hash,
        chain=chains.phase.name.lower(),
        requests=len(trace.requests),
        forwards=trace.num_forwards,
        layers=trace.geometry.moe_layers,
        experts=trace.geometry.experts_per_layer,
        top_k=trace.geometry.top_k,
        overlap={gap: overlap for gap, overlap in gaps.items() if overlap is not None},
        adjacent_by_layer=_by_layer(sums[:, 0].sum(axis=0)),
        boundary=Boundary(_overlap(sums[:, AFTER_DENOISE]), _overlap(sums[:, AFTER_COMMIT]))
        if denoise
        else None,
        active=_active(steps, chains),
        forwards_per_block=_forwards_per_block(chains) if denoise else None,
        tokens_per_forward=_tokens_per_forward(steps, chains) if denoise else None,
        persistence=persistence(trace, steps, chains.forward) if denoise else None,
        popularity=_popularity(trace),
        drafts=None if drafts is None else drafts.metrics(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Chains:
    """Forwards whose neighbours are compared, in order."""

    phase: Phase
    forward: Ints  # [n]
    chain: Ints  # [n] number of the forward's chain, ascending
    row: Ints  # [F] place of each forward's request among the requests
    requests: int

    @classmethod
    def of(cls, steps: Steps, manifest: Manifest) -> _Chains:
        phase = Phase.DENOISE if (steps.phase == Phase.DENOISE).any() else Phase.DECODE
        forward = np.flatnonzero(steps.phase == phase)
        key = np.stack([steps.request[forward], steps.block[forward]])
        new = np.ones(len(forward), dtype=bool)
        new[1:] = (np.diff(key, axis=1) != 0).any(axis=0)
        if phase is Phase.DECODE and "requests" not in manifest.lacks:
            # a context that does not grow has started again
            new[1:] |= np.diff(steps.context[forward]) <= 0
        if not manifest.ordered:
            new[:] = True  # no forward is known to follow another
        chain = np.cumsum(new)
        names, row = np.unique(steps.request, return_inverse=True)
        return cls(phase, forward, chain.astype(np.int64), row.astype(np.int64), len(names))

    def pairs(self, gap: int) -> tuple[Ints, Ints]:
        """Return forwards of one chain that lie `gap` apart."""
        old, new = np.arange(len(self.chain) - gap), np.arange(gap, len(self.chain))
        same = self.chain[old] == self.chain[new]
        return self.forward[old[same]], self.forward[new[same]]


def _boundaries(steps: Steps, chains: _Chains) -> Iterator[tuple[int, Ints, Ints]]:
    """Yield slot and pairs: last forward of a block, first of the next block of the request."""
    first = np.flatnonzero(np.diff(chains.chain, prepend=-1) != 0)
    last = chains.forward[np.append(first[1:], len(chains.chain)) - 1][:-1]
    following = chains.forward[first[1:]]
    same = steps.request[last] == steps.request[following]
    last, following = last[same], following[same]
    yield AFTER_DENOISE, last, following
    commit = last + 1  # right behind the last denoising forward, if there was one
    committed = steps.phase[commit] == Phase.COMMIT
    yield AFTER_COMMIT, commit[committed], following[committed]


def _set_sums(steps: Steps, chains: _Chains) -> Doubles:
    """Return sums of the measures by request, slot (gaps, boundaries) and layer."""
    from oled.trace.stats import kernels

    slots = len(GAPS) + 2
    shape = (chains.requests, slots, len(steps.num_experts), kernels.MEASURES)
    sums = np.zeros(shape)
    compared = [(place, *chains.pairs(gap)) for place, gap in enumerate(GAPS)]
    if chains.phase is Phase.DENOISE:
        compared += _boundaries(steps, chains)
    pairs = LayerPairs(steps)
    for slot, old, new in compared:
        before, after = pairs.of(old, new)
        kernels.compare_sets(
            before,
            after,
            chains.row[steps.forward[before]],
            slot,
            steps.layer,
            steps.offsets,
            steps.expert,
            steps.count,
            steps.num_experts,
            sums,
        )
    return sums


def _overlap(sums: Doubles) -> Overlap | None:
    """Return means from sums by request, layer and measure."""
    from oled.trace.stats import kernels

    by_request = sums.sum(axis=1)
    pairs = by_request[:, kernels.PAIRS]
    if not pairs.any():
        return None

    def mean(measure: int) -> Estimate:
        return ratio(by_request[:, measure], pairs) or Estimate(0.0)

    return Overlap(
        pairs=int(pairs.sum()),
        of_new=mean(kernels.OF_NEW),
        of_old=mean(kernels.OF_OLD),
        jaccard=mean(kernels.JACCARD),
        chance_of_new=mean(kernels.CHANCE_NEW).value,
        chance_of_old=mean(kernels.CHANCE_OLD).value,
        cosine=mean(kernels.COSINE),
    )


def _by_layer(sums: Doubles) -> LayerOverlap | None:
    from oled.trace.stats import kernels

    pairs = sums[:, kernels.PAIRS]
    if not pairs.any():
        return None

    def means(measure: int) -> tuple[float | None, ...]:
        return means_of(sums[:, measure], pairs)

    return LayerOverlap(
        gap=GAPS[0],
        of_new=means(kernels.OF_NEW),
        of_old=means(kernels.OF_OLD),
        jaccard=means(kernels.JACCARD),
        chance_of_new=means(kernels.CHANCE_NEW),
    )


def _active(steps: Steps, chains: _Chains) -> Active | None:
    size = np.diff(steps.offsets).astype(np.float64)
    phase = steps.phase[steps.forward]
    here = phase == chains.phase
    if not here.any():
        return None
    layers = len(steps.num_experts)
    count = np.maximum(np.bincount(steps.layer[here], minlength=layers), 1)
    by_layer = np.bincount(steps.layer[here], size[here], minlength=layers) / count
    row = chains.row[steps.forward[here]]
    share = size[here] / steps.num_experts[steps.layer[here]]
    number = np.bincount(row, minlength=chains.requests).astype(np.float64)
    mean = ratio(np.bincount(row, size[here], minlength=chains.requests), number)
    mean_share = ratio(np.bincount(row, share, minlength=chains.requests), number)
    if mean is None or mean_share is None:
        return None
    return Active(
        by_layer=tuple(map(float, by_layer)),
        share_by_layer=tuple(map(float, by_layer / steps.num_experts)),
        mean=mean,
        share=mean_share,
        times_one_token=mean.value / steps.top_k,
        by_phase={Phase(p).name.lower(): float(size[phase == p].mean()) for p in np.unique(phase)},
    )


def _forwards_per_block(chains: _Chains) -> Estimate | None:
    row = chains.row[chains.forward]
    first = np.diff(chains.chain, prepend=-1) != 0
    forwards = np.bincount(row, minlength=chains.requests).astype(np.float64)
    return ratio(forwards, np.bincount(row, first, minlength=chains.requests))


def _tokens_per_forward(steps: Steps, chains: _Chains) -> Estimate | None:
    row = chains.row[chains.forward]
    accepted = np.bincount(row, steps.accepted[chains.forward], minlength=chains.requests)
    return ratio(accepted, np.bincount(row, minlength=chains.requests).astype(np.float64))


def _popularity(trace: Trace) -> Popularity:
    """Count routed tokens by expert, pads left out."""
    routing, geometry = trace.routing, trace.geometry
    token = trace.forwards.token_offsets[routing.forward] + routing.token
    real = trace.tokens.state[token] != TokenState.PAD
    shares, dead, entropy = [], [], []
    for layer, experts in zip(geometry.moe_layers, geometry.experts_per_layer, strict=True):
        ids = routing.expert_ids[real & (routing.layer == layer)].ravel()
        counts = np.bincount(ids[ids != NO_EXPERT], minlength=experts)[:experts]
        share = np.sort(counts / max(counts.sum(), 1))[::-1]
        alive = share[share > 0]
        shares.append(tuple(map(float, share)))
        dead.append(int(experts - len(alive)))
        spread = -float((alive * np.log(alive)).sum())
        entropy.append(spread / float(np.log(experts)) if experts > 1 else 1.0)
    return Popularity(tuple(shares), tuple(dead), tuple(entropy))
