"""CSV of llama.cpp's moe-trace: `layer,expert`, one line an activation, in the order of execution.

No token, weight or request is named. A pass begins where the layer falls; with `top_k` known, its
lines of a layer are tokens of k experts each. Passes of several tokens count as prefill, those of
one token as decoding. llama.cpp computes the last layer for output tokens only: a declared gap.
The file is streamed twice, first to learn its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from oled.trace.errors import TraceError
from oled.trace.importers.arrays import damage
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Format, Source, provenance
from oled.trace.limits import MAX_LAYERS
from oled.trace.manifest import Gap, Kept
from oled.trace.options import Options
from oled.trace.schema import (
    MAX_TOKENS,
    NO_EXPERT,
    ForwardRecord,
    Phase,
)
from oled.types import Ints

NAME = "llama_cpp"
HEADER = "layer,expert"
LACKS = ("weights", "confidence", "requests", "token_ids")
OPTIONS = {name: FACTS[name] for name in ("model", "experts", "top_k", "expert_bytes", "layers")}


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """One model pass: its layers, ascending, and their experts, token by token."""

    first_row: int  # in the file, from 0, without the header
    layers: Ints  # [n]
    experts: tuple[Ints, ...]  # of each layer [tokens * k]


def read(path: Path, options: Options) -> Source:
    """Read all passes as request 0."""
    facts = Facts.of(options)
    top_k = facts.require_top_k()
    layers: set[int] = set()
    short: set[bool] = set()  # whether the last layer had the last token only, of passes cut there
    for one in _passes(path, top_k):
        layers.update(one.layers.tolist())
        lengths = [len(experts) // top_k for experts in one.experts]
        if lengths[-1] < lengths[0]:
            short.add(lengths[-1] == 1)
    if len(layers) < 2:
        raise TraceError(f"{path}: {len(layers)} layers: passes can not be told apart")
    axis = tuple(sorted(layers))
    geometry = facts.geometry(axis, top_k)
    kept = Kept.LAST_TOKEN if short == {True} else Kept.SOME
    reason = "the engine prunes prompt tokens whose output nobody reads"
    gaps = (Gap(axis[-1], Phase.PREFILL, kept, reason),) if short else ()
    about = provenance(NAME, path)
    mode = {"mode": "autoregressive"}
    manifest = facts.manifest(geometry, about, LACKS, decode=mode, gaps=gaps)
    return Source(manifest, _records(path, top_k, np.array(axis)))


FORMAT = Format(
    NAME,
    "llama.cpp's moe-trace: CSV of layer,expert in the order of execution",
    read,
    LACKS,
    OPTIONS,
)


def _records(path: Path, top_k: int, layers: Ints) -> Iterator[ForwardRecord]:
    position = 0
    for pass_id, one in enumerate(_passes(path, top_k)):
        if not np.array_equal(one.layers, layers):
            raise TraceError(
                f"{path}: the pass at row {one.first_row + 1} has {len(one.layers)} of "
                f"{len(layers)} layers: cut off?"
            )
        tokens = len(one.experts[0]) // top_k
        ids = np.full((len(layers), tokens, top_k), NO_EXPERT, dtype=np.uint16)
        present = np.zeros((len(layers), tokens), dtype=bool)
        for place, experts in enumerate(one.experts):
            count = len(experts) // top_k
            ids[place, tokens - count :] = experts.reshape(count, top_k)
            present[place, tokens - count :] = True
        phase = Phase.DECODE if tokens == 1 else Phase.PREFILL
        yield plain_record(
            pass_id,
            phase,
            layers,
            ids,
            context=position,
            produced=int(phase is Phase.DECODE),
            row_tokens=row_tokens(present),
        )
        position += tokens


def _passes(path: Path, top_k: int) -> Iterator[_Pass]:
    row = 0
    layers, experts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for more_layers, more_experts in _rows(path):
        layers, experts = np.append(layers, more_layers), np.append(experts, more_experts)
        ends = np.flatnonzero(np.diff(layers) < 0) + 1
        begin = 0
        for end in ends.tolist():
            yield _pass(path, row + begin, layers[begin:end], experts[begin:end], top_k)
            begin = end
        row, layers, experts = row + begin, layers[begin:], experts[begin:]
        if len(layers) > MAX_TOKENS * top_k * (len(np.unique(layers)) + 1):
            raise TraceError(f"{path}: the pass at row {row + 1} has more than {MAX_TOKENS} tokens")
    if not len(layers):
        raise TraceError(f"{path}: holds no rows")
    yield _pass(path, row, layers, experts, top_k)


def _pass(path: Path, row: int, layers: Ints, experts: Ints, top_k: int) -> _Pass:
    found, begins = np.unique(layers, return_index=True)
    pieces = tuple(np.split(experts, begins[1:]))
    lengths = [len(piece) for piece in pieces]
    for place, length in enumerate(lengths):
        at = f"{path}: the pass at row {row + 1}, layer {found[place]}"
        if length % top_k:
            raise TraceError(f"{at}: {length} experts are no tokens of top_k={top_k}: cut off?")
        # only the last layer may be cut to the tokens whose output is read
        if length != lengths[0] and (place < len(lengths) - 1 or length > lengths[0]):
            raise TraceError(f"{at}: {length} experts, the layer before has {lengths[0]}: cut off?")
        ordered = np.sort(pieces[place].reshape(-1, top_k), axis=1)
        twice = ordered[:, 1:] == ordered[:, :-1]
        if twice.any():
            token, slot = np.argwhere(twice)[0]
            raise TraceError(
                f"{at}: token {token} names expert {ordered[token, slot]} twice: is top_k={top_k} "
                f"right?"
            )
    return _Pass(row, found, pieces)


def _rows(path: Path) -> Iterator[tuple[Ints, Ints]]:
    """Yield layers and experts, a block at a time."""
    with damage(path, "layer,expert lines"):
        with path.open(encoding="utf-8") as file:
            header = file.readline(256).strip().replace('"', "").replace(" ", "") == HEADER
        reader = pa.csv.open_csv(
            path,
            read_options=pa.csv.ReadOptions(
                column_names=["layer", "expert"], skip_rows=int(header), use_threads=False
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types={"layer": pa.int32(), "expert": pa.int32()}
            ),
        )
    row = 0
    while True:
        with damage(path, f"layer,expert lines after row {row}"):
            batch: Any = next(reader, None)
            if batch is None:
                return
            if batch["layer"].null_count or batch["expert"].null_count:
                raise ValueError("an empty value")
            layers = batch["layer"].to_numpy().astype(np.int64)
            experts = batch["expert"].to_numpy().astype(np.int64)
        for name, values, limit in (("layer", layers, MAX_LAYERS), ("expert", experts, NO_EXPERT)):
            wrong = (values < 0) | (values >= limit)
            if wrong.any():
                place = int(np.argmax(wrong))
                raise TraceError(f"{path}: row {row + place + 1}: {name} {values[place]}")
        row += len(layers)
        yield layers, experts
