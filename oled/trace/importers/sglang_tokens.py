"""SGLang dumps with the ids of every token: a pass is one forward of all its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.importers.facts import Facts
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Source
from oled.trace.manifest import Gap, Kept
from oled.trace.schema import ForwardRecord, Phase, TokenState
from oled.types import Array, Bools, Ints

LACKS = ("weights", "confidence", "requests")
PHASES = {1: Phase.PREFILL, 2: Phase.DECODE, 3: Phase.PREFILL, 5: Phase.VERIFY, 6: Phase.DRAFT}
"""Of forward modes extend, decode, mixed, target verify, draft extend."""


@dataclass(frozen=True, slots=True, eq=False)
class RankTokens:
    """Tokens of a pass that one rank (and its copies) ran."""

    where: str
    ids: Array  # [layers, T, 8] physical, -1 unused
    experts: Array | None  # logical ids of physical ones [layers, physical]
    positions: Ints  # [T]
    token_ids: Ints  # [T]
    mode: int  # SGLang's number

    @property
    def phase(self) -> Phase:
        """Unknown modes count as decoding."""
        return PHASES.get(self.mode, Phase.DECODE)

    def logical(self, layers: NDArray[np.intp], top_k: int) -> NDArray[np.int32]:
        """Return logical ids of some layers [L, T, k]."""
        ids = np.asarray(self.ids[layers, :, :top_k])
        if self.experts is None:
            return ids.astype(np.int32)
        found = self.experts[layers[:, None, None], np.maximum(ids, 0)]
        return np.where(ids < 0, -1, found).astype(np.int32)

    def context(self) -> int:
        """Return the tokens cached before, over all rows: the position where a row begins."""
        begins = np.ones(len(self.positions), dtype=bool)
        if self.phase is not Phase.DECODE:  # in decoding each token is a row of its own
            begins[1:] = np.diff(self.positions) != 1
        return int(self.positions[begins].sum())


def token_source(
    passes: Sequence[Sequence[RankTokens]], facts: Facts, about: dict[str, Any]
) -> Source:
    """Make a source of passes, each with the ranks that have tokens of their own."""
    passes = [[one for one in ranks if len(one.positions)] for ranks in passes]
    passes = [ranks for ranks in passes if ranks]
    everyone = [one for ranks in passes for one in ranks]
    if not everyone:
        raise TraceError(f"{about['file']}: holds no tokens")
    if len({(len(one.ids), one.ids.shape[2]) for one in everyone}) > 1:
        raise TraceError(f"{about['file']}: records differ in layers or width")
    _refuse_unknown(everyone)
    top_k = _top_k(everyone, facts)
    axis = np.array(facts.layer_ids(len(everyone[0].ids)))
    routed = np.array([(one.ids >= 0).any(axis=(1, 2)) for one in everyone]).any(axis=0)
    if not routed.any():
        raise TraceError(f"{about['file']}: every id is -1: the router was not captured")
    places = np.flatnonzero(routed)
    maps = [one.experts for one in everyone if one.experts is not None]
    experts = max((int(m[places].max()) + 1 for m in maps), default=None)
    layers = axis[places]
    geometry = facts.geometry(tuple(layers.tolist()), top_k, experts=experts, num_layers=len(axis))
    gaps = tuple(_gaps(passes, places, geometry.moe_layers))
    manifest = facts.manifest(geometry, about, LACKS, decode={"mode": "serving"}, gaps=gaps)
    return Source(manifest, _records(passes, places, layers, top_k))


def _refuse_unknown(everyone: Sequence[RankTokens]) -> None:
    for one in everyone:
        limit = np.iinfo(np.uint16).max if one.experts is None else one.experts.shape[1]
        if int(one.ids.min()) < -1 or int(one.ids.max()) >= limit:
            layer, token, slot = np.argwhere((one.ids < -1) | (one.ids >= limit))[0]
            raise TraceError(
                f"{one.where}: layer {layer}, token {token}: expert id "
                f"{one.ids[layer, token, slot]}, the map has {limit}"
            )


def _top_k(everyone: Sequence[RankTokens], facts: Facts) -> int:
    """Return how many columns of the buffer are used: the first k."""
    width = everyone[0].ids.shape[2]
    while width > 1 and not any((one.ids[:, :, width - 1] >= 0).any() for one in everyone):
        width -= 1
    if facts.top_k is not None and facts.top_k < width:
        raise TraceError(
            f"{everyone[0].where}: {width} columns of ids are used, top_k={facts.top_k} was named"
        )
    return facts.top_k or width


def _present(ranks: Sequence[RankTokens], places: NDArray[np.intp]) -> Bools:
    """Return which (layer, token) cells of a pass have ids: bool[L, T]."""
    return np.concatenate([(one.ids[places] >= 0).any(axis=2) for one in ranks], axis=1)


def _phase(ranks: Sequence[RankTokens]) -> Phase:
    """Return the phase of the longest part, where ranks differ."""
    return min(one.phase for one in ranks)


def _gaps(
    passes: Sequence[Sequence[RankTokens]], places: NDArray[np.intp], layers: tuple[int, ...]
) -> Iterator[Gap]:
    missing: dict[Phase, Bools] = {}
    for ranks in passes:
        present = _present(ranks, places)
        lost = (present.any(axis=0) & ~present).any(axis=1)
        missing[_phase(ranks)] = missing.get(_phase(ranks), np.zeros(len(layers), bool)) | lost
    for phase, layers_lost in sorted(missing.items()):
        for place in np.flatnonzero(layers_lost):
            yield Gap(layers[place], phase, Kept.SOME, "rows that the recorder did not fill")


def _records(
    passes: Sequence[Sequence[RankTokens]],
    places: NDArray[np.intp],
    layers: Ints,
    top_k: int,
) -> Iterator[ForwardRecord]:
    for pass_id, ranks in enumerate(passes):
        ids = np.concatenate([one.logical(places, top_k) for one in ranks], axis=1)
        present = _present(ranks, places)
        tokens = present.any(axis=0)
        decodes = np.concatenate(
            [np.full(len(one.positions), one.phase is Phase.DECODE) for one in ranks]
        )
        state = np.where(decodes, TokenState.DECODED, TokenState.PROMPT)
        accepted = (decodes & tokens).astype(np.uint8)
        yield plain_record(
            pass_id,
            _phase(ranks),
            layers,
            ids,
            positions=np.concatenate([one.positions for one in ranks]),
            token_ids=np.concatenate([one.token_ids for one in ranks]),
            context=sum(one.context() for one in ranks),
            state=np.where(tokens, state, TokenState.PAD),
            accepted=accepted,
            produced=int(accepted.sum()),
            row_tokens=row_tokens(present),
        )
