"""Dumps of SGLang's expert distribution recorder (`--expert-distribution-recorder-mode`).

A `.pt` file, or the folder of all ranks' files. `per_token`: ids of every token, in a buffer 8 wide
filled with -1. `per_pass`: tokens of each expert, by pass. `stat`, `stat_approx`: the same, added
up over ranks, out of a ring buffer that is dumped unrotated, so that the order of passes is lost
(`ordered=true` vouches for it where the buffer was unlimited).

Ids and counts are of physical experts; the dump's map (the last one, should experts have moved)
makes logical ones of them. Ranks of one tensor-parallel group write identical copies, which are
counted once; ranks with data of their own are added (`dp_size=N` says how many there are, else
equal data are copies). In `stat` dumps the copies have been added up already: `tp_size=N` divides.

The recorder leaves request ids out: a pass is one forward of all its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, brief
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.sglang_counts import count_source, logical_counts
from oled.trace.importers.sglang_tokens import LACKS, RankTokens, token_source
from oled.trace.importers.source import Format, Source, provenance, source_files
from oled.trace.importers.tensors import read_tensors
from oled.trace.options import Options
from oled.types import Array, Ints

NAME = "sglang_dump"
SUFFIXES = (".pt",)
OPTIONS = {
    **FACTS,
    "dp_size": "ranks with tokens of their own; the others are copies (found by comparing)",
    "tp_size": "copies that were added up in stat dumps (1)",
    "ordered": "true: the order of a stat dump's passes is that of time (false)",
    "requests": "false: the recorder keeps no request ids",
}
MAP, IDS, COUNTS, LOGICAL = (
    "last_physical_to_logical_map",
    "topk_ids_of_layer",
    "global_physical_count",
    "logical_count",
)


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """What one rank wrote of one pass."""

    fields: JsonFields
    data: Array  # ids [layers, tokens, 8] or counts [layers, physical experts]
    experts: Array | None  # logical ids of physical ones [layers, physical]

    def content(self) -> bytes:
        """Return a digest that is equal for copies: of the data, and of tokens, if any."""
        digest = hashlib.sha256(self.data.tobytes())
        for key in ("input_ids", "positions"):
            digest.update(repr(self.fields.data.get(key)).encode())
        return digest.digest()


def read(path: Path, options: Options) -> Source:
    """Read a dump by the mode that it was made in."""
    if options.flag("requests", False):
        raise TraceError(
            f"{path}: rows can not be tied to requests: the recorder leaves request ids out; "
            f"import without requests=true, or record with return_routed_experts"
        )
    packs = [JsonFields(read_tensors(file), str(file)) for file in source_files(path, SUFFIXES)]
    facts, about = Facts.of(options), provenance(NAME, path)
    if any(pack.has(LOGICAL) for pack in packs):
        counts = _stat_counts(packs, options.integer("tp_size"))
        return count_source(counts, facts, about, ordered=options.flag("ordered", False))
    key = IDS if any(_holds(pack, IDS) for pack in packs) else COUNTS
    dp_size = options.integer("dp_size")
    passes = [_own_shares(ranks, dp_size) for ranks in _passes(packs, key)]
    if not passes:
        raise TraceError(f"{path}: holds no records")
    if key == IDS:
        return token_source([[_tokens(one) for one in ranks] for ranks in passes], facts, about)
    counts = [_added([logical_counts(one.data, one.experts) for one in each]) for each in passes]
    return count_source(counts, facts, about, ordered=True)


FORMAT = Format(
    NAME,
    "SGLang's expert distribution recorder: per_token, per_pass, stat (.pt, or a folder)",
    read,
    LACKS,
    OPTIONS,
    SUFFIXES,
)


def _holds(pack: JsonFields, key: str) -> bool:
    return any(key in record for record in pack.items("records", dict))


def _passes(packs: Sequence[JsonFields], key: str) -> list[list[_Record]]:
    """Return records by pass, ascending, each pass by rank."""
    found: dict[int, dict[int, _Record]] = {}
    for pack in packs:
        experts = _array(pack, MAP, 2) if pack.has(MAP) else None
        for place, data in enumerate(pack.items("records", dict)):
            fields = JsonFields(data, f"{pack.where}: record {place}")
            number, rank = fields.get("forward_pass_id", int), fields.get("rank", int)
            ranks = found.setdefault(number, {})
            if rank in ranks:
                raise TraceError(f"{fields.where}: pass {number} of rank {rank} is there twice")
            ids = _array(fields, key, 3 if key == IDS else 2)
            if experts is not None and len(experts) != len(ids):
                raise TraceError(f"{fields.where}: {len(ids)} layers, the map has {len(experts)}")
            ranks[rank] = _Record(fields, ids, experts)
    return [[ranks[rank] for rank in sorted(ranks)] for _, ranks in sorted(found.items())]


def _own_shares(ranks: list[_Record], dp_size: int | None) -> list[_Record]:
    """Keep one record of each group of copies."""
    if dp_size is None:
        return list({one.content(): one for one in reversed(ranks)}.values())[::-1]
    if not dp_size or len(ranks) % dp_size:
        raise TraceError(f"{ranks[0].fields.where}: {len(ranks)} ranks are no {dp_size} groups")
    copies = len(ranks) // dp_size
    for place, one in enumerate(ranks):
        first = ranks[place - place % copies]
        if one.content() != first.content():
            raise TraceError(
                f"{one.fields.where}: differs from {first.fields.where}, which should be a copy: "
                f"is dp_size={dp_size} right?"
            )
    return ranks[::copies]


def _added(counts: list[Ints]) -> Ints:
    """Add the counts of all ranks; their maps may name different last experts."""
    widest = max(one.shape[1] for one in counts)
    padded = [np.pad(one, ((0, 0), (0, widest - one.shape[1]))) for one in counts]
    return np.asarray(np.sum(padded, axis=0))


def _tokens(record: _Record) -> RankTokens:
    fields = record.fields
    count = record.data.shape[1]
    positions, token_ids = fields.int_array("positions"), fields.int_array("input_ids")
    if len(positions) != count or len(token_ids) != count:
        raise TraceError(
            f"{fields.where}: ids of {count} tokens, but {len(positions)} positions and "
            f"{len(token_ids)} input ids"
        )
    mode = fields.get("forward_mode", int)
    return RankTokens(fields.where, record.data, record.experts, positions, token_ids, mode)


def _stat_counts(packs: Sequence[JsonFields], tp_size: int | None) -> list[Array]:
    """Return counts [layers, E] of the passes that the ring buffers hold."""
    found: list[Array] = []
    for pack in packs:
        counts = _array(pack, LOGICAL, 3)
        found += [one for one in counts if one.any()]
    common = int(np.gcd.reduce([np.gcd.reduce(one, axis=None) for one in found] or [0]))
    if tp_size is None and common > 1:
        raise TraceError(
            f"{packs[0].where}: all counts are multiples of {common}: were {common} copies added "
            f"up? Say tp_size={common}, or tp_size=1"
        )
    copies = tp_size or 1
    if common % copies:
        raise TraceError(f"{packs[0].where}: counts are no multiples of tp_size={copies}")
    return [one // copies for one in found]


def _array(fields: JsonFields, key: str, dimensions: int) -> Array:
    """Return an array of whole numbers of so many dimensions, none of them empty but the tokens."""
    value = fields.data.get(key)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise TraceError(f"{fields.where}: '{key}' must be a tensor of integers: {brief(value)}")
    if value.ndim != dimensions or 0 in (value.shape[0], value.shape[-1]):
        raise TraceError(f"{fields.where}: '{key}' has shape {list(value.shape)}")
    return value
