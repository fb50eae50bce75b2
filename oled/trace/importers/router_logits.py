"""Router logits of transformers (`output_router_logits=True`): per layer [batch * seq, experts].

A `.pt`, `.npz` or `.safetensors` file is one forward; a folder of them is one after the other, by
name. A list holds the layers in order, None for dense ones; names end in the layer's number. An
array `attention_mask` [batch, seq] tells rows and pads apart, `input_ids` the tokens; else `batch`.

The top-k are taken anew from the logits. That is what the model used where the router does just
that; a bias of the selection or groups of experts (DeepSeek-V3, GLM-4, LLaDA2) choose otherwise:
the trace says `applied_routing` is lacking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.logit_files import LogitFile, read_logits
from oled.trace.importers.logits import Routing
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Format, Source, provenance, source_files
from oled.trace.options import Options
from oled.trace.schema import ForwardRecord, Phase, RouterScores, TokenState
from oled.types import Array, Bools, Ints

NAME = "router_logits"
SUFFIXES = (".pt", ".npz", ".safetensors")
LACKS = ("confidence", "applied_routing")
OPTIONS = {
    **FACTS,
    "softmaxed": "true: the tensors are probabilities already (false)",
    "scoring": "softmax, sigmoid, or selected (softmax over the chosen ones) (softmax)",
    "normalise": "whether the chosen weights are made to add up to 1 (true)",
    "scale": "factor on the weights, as routed_scaling_factor (1)",
    "batch": "rows of the batch, where the file does not say (1)",
    "scores": "also keep so many of the best scores of each token (0)",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The batch of one forward, as rows of tokens."""

    real: Bools  # [B, S] false for pads
    token_ids: Ints  # [B, S] -1 unknown

    @classmethod
    def of(cls, file: LogitFile, batch: int | None) -> _Rows:
        tokens = len(next(iter(file.layers.values())))
        rows = batch or file.batch or 1
        for array in (file.mask, file.token_ids):
            rows = rows if array is None or batch else len(array)
        if tokens % rows:
            raise TraceError(f"{file.path}: {tokens} tokens are no batch of {rows} rows")
        length = tokens // rows
        real = np.ones((rows, length), dtype=bool)
        ids = np.full((rows, length), -1, dtype=np.int64)
        if file.mask is not None:  # of the cached tokens, too, in later forwards
            real = _last(file, file.mask, real.shape)
        if file.token_ids is not None:
            ids = _last(file, file.token_ids, ids.shape).astype(np.int64)
        return cls(real, ids)


def _last(file: LogitFile, array: Array, shape: tuple[int, int]) -> Array:
    if len(array) != shape[0] or array.shape[1] < shape[1]:
        raise TraceError(
            f"{file.path}: a mask or ids of {list(array.shape)} for {shape[0]} rows of {shape[1]} "
            f"tokens"
        )
    return array[:, -shape[1] :]


def read(path: Path, options: Options) -> Source:
    """Read rows of the batch as requests; forwards of several tokens are prefill."""
    files = source_files(path, SUFFIXES)
    first = read_logits(files[0])
    facts = Facts.of(options)
    routing = Routing.of(options, facts.require_top_k())
    axis = facts.layer_ids(first.count)
    layers = tuple(axis[place] for place in sorted(first.layers))
    widths = {array.shape[1] for array in first.layers.values()}
    if len(widths) > 1 and facts.experts is None:
        raise TraceError(f"{first.path}: layers of {sorted(widths)} experts: list them, experts=…")
    geometry = facts.geometry(
        layers,
        routing.top_k,
        experts=widths.pop() if len(widths) == 1 else None,
        num_layers=len(axis),
    )
    kind, total = routing.kind
    rows = _Rows.of(first, options.integer("batch"))
    known = (rows.token_ids >= 0).all()
    manifest = facts.manifest(
        geometry,
        {**provenance(NAME, path), "routing": "top-k of the logits, taken anew"},
        LACKS if known else (*LACKS, "token_ids"),
        weight_kind=kind,
        weight_sum=total,
        decode={"mode": "autoregressive"},
    )
    return Source(manifest, _records(files, routing, geometry.experts_per_layer, options, layers))


FORMAT = Format(
    NAME,
    "transformers' router_logits: per layer [batch * seq, experts] (.pt, .npz, .safetensors)",
    read,
    LACKS,
    OPTIONS,
    SUFFIXES,
)


def _records(
    files: list[Path],
    routing: Routing,
    experts: tuple[int, ...],
    options: Options,
    layers: tuple[int, ...],
) -> Iterator[ForwardRecord]:
    batch, kept = options.integer("batch"), options.integer("scores") or 0
    seen: Ints | None = None  # tokens of each row so far
    for pass_id, path in enumerate(files):
        file = read_logits(path)
        if tuple(a.shape[1] for _, a in sorted(file.layers.items())) != experts:
            raise TraceError(f"{path}: other layers or experts than in {files[0].name}")
        rows = _Rows.of(file, batch)
        if seen is None:
            seen = np.zeros(len(rows.real), dtype=np.int64)
        if len(seen) != len(rows.real):
            raise TraceError(f"{path}: {len(rows.real)} rows, {files[0].name} has {len(seen)}")
        ids, weights, scores = _route(file, routing, kept)
        for request, real in enumerate(rows.real):
            here = slice(request * real.size, (request + 1) * real.size)
            if not real.any():
                continue
            decode = real.size == 1
            present = np.broadcast_to(real, (len(layers), real.size))
            yield plain_record(
                pass_id,
                Phase.DECODE if decode else Phase.PREFILL,
                np.array(layers),
                ids[:, here],
                request=request,
                weights=weights[:, here],
                positions=seen[request] + np.maximum(np.cumsum(real) - 1, 0),
                token_ids=rows.token_ids[request],
                context=int(seen[request]),
                state=np.where(
                    real, TokenState.DECODED if decode else TokenState.PROMPT, TokenState.PAD
                ),
                produced=int(decode),
                row_tokens=row_tokens(present),
                scores=_cut(scores, here),
            )
            seen[request] += int(real.sum())


def _route(
    file: LogitFile, routing: Routing, kept: int
) -> tuple[Array, Array, RouterScores | None]:
    """Return ids and weights [L, tokens, k] of all tokens, and their best scores."""
    ids, weights, best, values = [], [], [], []
    for place, logits in sorted(file.layers.items()):
        scores = routing.scores(logits, f"{file.path}: layer {place}")
        ranked = routing.best(scores, max(routing.top_k, kept))
        chosen = ranked[:, : routing.top_k]
        ids.append(chosen)
        weights.append(routing.weights(logits, scores, chosen))
        best.append(ranked[:, :kept])
        values.append(np.take_along_axis(scores, ranked[:, :kept], axis=1))
    found = RouterScores(np.stack(best), np.stack(values)) if kept else None
    return np.stack(ids), np.stack(weights), found


def _cut(scores: RouterScores | None, here: slice) -> RouterScores | None:
    if scores is None:
        return None
    return RouterScores(scores.expert_ids[:, here], scores.values[:, here])
