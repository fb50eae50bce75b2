"""SGLang dumps that only count: each pass's tokens of each expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.importers.counts import rows_of_counts, tokens_of_counts
from oled.trace.importers.facts import Facts
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Source
from oled.trace.manifest import Gap, Kept
from oled.trace.schema import MAX_TOKENS, ForwardRecord, Phase
from oled.types import Array, Ints

LACKS = (
    "weights",
    "confidence",
    "requests",
    "phases",
    "tokens",
    "token_ids",
    "positions",
)


def logical_counts(counts: Array, experts: Array | None) -> Ints:
    """Return counts [layers, E] from those of physical experts: replicas are added."""
    if experts is None:
        return counts.astype(np.int64)
    if experts.shape != counts.shape or int(experts.min()) < 0 or int(experts.max()) > MAX_TOKENS:
        raise TraceError(
            f"a map of experts {list(experts.shape)} from {experts.min()} to {experts.max()} does "
            f"not fit counts {list(counts.shape)}"
        )
    total = np.zeros((len(counts), int(experts.max()) + 1), dtype=np.int64)
    np.add.at(total, (np.arange(len(counts))[:, None], experts), counts)
    return total


def count_source(
    counts: Sequence[Array], facts: Facts, about: dict[str, Any], *, ordered: bool
) -> Source:
    """Make forwards of made-up tokens with the same counts from passes of counts [layers, E]."""
    top_k = facts.require_top_k()
    kept = [one for one in counts if one.any()]
    if not kept:
        raise TraceError(f"{about['file']}: every count is zero: nothing was recorded")
    if len({one.shape for one in kept}) > 1 or min(int(one.min()) for one in kept) < 0:
        raise TraceError(f"{about['file']}: passes differ in shape, or a count is negative")
    ids = np.array(facts.layer_ids(kept[0].shape[0]))
    moe = np.array([one.any(axis=1) for one in kept]).any(axis=0)
    layers = ids[moe]
    kept = [one[moe].astype(np.int64) for one in kept]
    geometry = facts.geometry(
        tuple(layers.tolist()), top_k, experts=kept[0].shape[1], num_layers=len(ids)
    )
    uneven = np.zeros(len(layers), dtype=bool)
    for number, one in enumerate(kept):
        tokens = tokens_of_counts(one, top_k)
        if tokens.max() > MAX_TOKENS:
            raise TraceError(
                f"{about['file']}: pass {number}: counts of {tokens.max()} tokens; a forward holds "
                f"at most {MAX_TOKENS}"
            )
        uneven |= tokens < tokens.max()
    reason = "the layers' counts do not add up to the same number of tokens"
    manifest = facts.manifest(
        geometry,
        about,
        LACKS if ordered else (*LACKS, "order"),
        decode={"mode": "serving"},
        gaps=tuple(
            Gap(int(layers[place]), Phase.DECODE, Kept.SOME, reason)
            for place in np.flatnonzero(uneven)
        ),
        ordered=ordered,
    )
    return Source(manifest, _records(kept, layers, top_k))


def _records(counts: Sequence[Ints], layers: Ints, top_k: int) -> Iterator[ForwardRecord]:
    for pass_id, one in enumerate(counts):
        ids, present = rows_of_counts(one, top_k)
        yield plain_record(
            pass_id,
            Phase.DECODE,
            layers,
            ids,
            produced=ids.shape[1],
            row_tokens=row_tokens(present),
        )
