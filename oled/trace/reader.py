"""From a trace folder to arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from oled.trace.errors import TraceError
from oled.trace.files import Columns, batches, row_groups, unlisted_files, verify_part
from oled.trace.limits import require_memory
from oled.trace.manifest import Manifest, Status, read_manifest
from oled.trace.schema import Phase, TokenState
from oled.trace.tables import (
    FORWARD_COLUMNS,
    FORWARDS,
    PREDICTIONS,
    REQUIRED_TABLES,
    ROUTING,
    SCORES,
    TOKEN_COLUMNS,
    TOKENS,
    ForwardTable,
    PredictionTable,
    RoutingTable,
    ScoreTable,
    TokenTable,
    Trace,
)
from oled.types import Array, Ints

MAX_PREDICTORS = 256


def load(path: str | Path, *, allow_partial: bool = False, verify: bool = False) -> Trace:
    """Read a trace; `verify` compares every part with its checksum first.

    A partial trace (a crash, an exception, a recorder still at work) is refused unless allowed;
    then its closed parts are read.
    """
    folder = Path(path)
    manifest = open_manifest(folder, allow_partial=allow_partial)
    if verify:
        for part in manifest.parts:
            verify_part(folder, part)
    present = {part.table for part in manifest.parts}
    wanted = [table for table in (*REQUIRED_TABLES, SCORES) if table in present]
    columns = {table: read_columns(folder, manifest, table) for table in wanted}
    validate(folder, columns)
    said = None
    if PREDICTIONS in present:
        said = _read_predictions(folder, manifest, len(columns[FORWARDS]["forward"]))
    return assemble(folder, manifest, trace_hash(manifest), columns, said)


def open_manifest(folder: Path, *, allow_partial: bool = False) -> Manifest:
    """Read the manifest of a trace that has all tables and is whole, unless partial is allowed."""
    manifest = read_manifest(folder)
    if manifest.status is Status.PARTIAL and not allow_partial:
        raise TraceError(partial_message(folder, manifest))
    present = {part.table for part in manifest.parts}
    for table in REQUIRED_TABLES:
        if table not in present:
            raise TraceError(f"{folder}: there is no closed part of '{table}'; record again")
    return manifest


def validate(folder: Path, columns: Mapping[str, Columns]) -> None:
    """Refuse what array code relies on and would not notice; the rest is for `check`."""
    forwards, tokens, scores = columns[FORWARDS], columns[TOKENS], columns.get(SCORES)
    count, total = len(forwards["forward"]), int(forwards["tokens"].sum(dtype=np.int64))
    if len(tokens["position"]) != total:
        raise TraceError(
            f"{folder}: {len(tokens['position'])} token rows, but the forwards add up to {total}; "
            f"run `oled check` on it"
        )
    rules = [
        ("forwards are not numbered 0, 1, 2, …", forwards["forward"] != np.arange(count)),
        ("a phase is unknown", forwards["phase"] > max(Phase)),
        ("a forward has no tokens", forwards["tokens"] < 1),
        ("a context length is negative", forwards["context"] < 0),
        ("a token's state is unknown", tokens["state"] > max(TokenState)),
    ]
    if scores is not None:
        owner = np.minimum(scores["forward"], count - 1)
        astray = (scores["forward"] != owner) | (scores["token"] >= forwards["tokens"][owner])
        rules.append(("scores are of an unknown forward or token", astray))
    for text, wrong in rules:
        if wrong.any():
            raise TraceError(f"{folder}: {text} (row {np.argmax(wrong)}); run `oled check` on it")


def assemble(
    path: Path,
    manifest: Manifest,
    digest: str,
    columns: Mapping[str, Columns],
    predictions: PredictionTable | None,
) -> Trace:
    """Make a trace from the columns of its tables."""
    forwards, tokens = columns[FORWARDS], columns[TOKENS]
    scores: dict[str, Any] | None = dict(columns[SCORES]) if SCORES in columns else None
    return Trace(
        path=path,
        manifest=manifest,
        hash=digest,
        forwards=ForwardTable(
            **{name: forwards[name] for name, _ in FORWARD_COLUMNS},
            token_offsets=offsets_of(forwards["tokens"]),
        ),
        tokens=TokenTable(**{name: tokens[name] for name, _ in TOKEN_COLUMNS}),
        routing=RoutingTable(**columns[ROUTING]),
        predictions=predictions,
        scores=None if scores is None else ScoreTable(**{"biased": None} | scores),
    )


def offsets_of(counts: Array) -> Ints:
    """Return where each of n ranges of these lengths begins, and the end: [n+1]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges_of(begins: Ints, lengths: Ints) -> Ints:
    """Return the numbers of n ranges, one range after the other: i64[sum of lengths]."""
    first = begins - np.cumsum(lengths) + lengths
    return np.asarray(np.arange(lengths.sum()) + np.repeat(first, lengths))


def trace_hash(manifest: Manifest) -> str:
    """Return the name in results: sha256 of the geometry and the parts' checksums."""
    digest = hashlib.sha256(json.dumps(manifest.geometry.to_json(), sort_keys=True).encode())
    for part in manifest.parts:
        digest.update(f"{part.table} {part.sha256}\n".encode())
    return digest.hexdigest()


def partial_message(folder: Path, manifest: Manifest) -> str:
    """Say what a partial trace still holds, what is lost, and what to do."""
    kept = [part for part in manifest.parts if part.table == FORWARDS]
    forwards = sum(part.rows for part in kept)
    lost = unlisted_files(folder, {part.file for part in manifest.parts})
    broken = f"; {some(lost)} never closed" if lost else ""
    planned = f" of {len(manifest.prompts)} planned requests" if manifest.prompts else ""
    if not forwards:
        none = f", none{planned}" if planned else ""
        return (
            f"{folder}: the trace is partial and holds no closed part{none}{broken}. Record again"
        )
    return (
        f"{folder}: the trace is partial: {len(kept)} closed parts hold forwards 0 to "
        f"{forwards - 1}{_done(folder, manifest, planned)}{broken}; everything from forward "
        f"{forwards} on is lost. Record again, or use what is left with allow_partial=true"
    )


def _done(folder: Path, manifest: Manifest, planned: str) -> str:
    """Say how many requests the closed parts hold; nothing where they can not be read."""
    try:
        requests = np.unique(read_columns(folder, manifest, FORWARDS, ["request"])["request"])
    except TraceError:
        return ""
    batch = manifest.decode.get("batch_size")
    cut = "the last may be cut off" if batch in (None, 1) else f"the last {batch} may be cut off"
    return f", {len(requests)}{planned or ' requests'} ({cut})"


def some(names: Sequence[str], limit: int = 5) -> str:
    """Name the first few of a list, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_columns(
    folder: Path, manifest: Manifest, table: str, names: Sequence[str] | None = None
) -> Columns:
    """Read a table's columns from all parts, without lists of varying length, filled in place."""
    parts = [part for part in manifest.parts if part.table == table]
    total = sum(part.rows for part in parts)
    columns: Columns = {}
    at = 0
    for part in parts:
        for group, _ in row_groups(folder, part, manifest.geometry.top_k, names):
            if not columns:
                wanted = total * sum(values[:1].nbytes for values in group.values())
                require_memory(wanted, f"{folder}: table '{table}'")
                for name, values in group.items():
                    columns[name] = np.empty((total, *values.shape[1:]), dtype=values.dtype)
            _fill(folder / part.file, columns, group, at)
            at += len(next(iter(group.values())))
    if not columns:
        raise TraceError(f"{folder}: table '{table}' has no rows; record again")
    return columns


def _fill(path: Path, columns: Columns, group: Columns, at: int) -> None:
    if group.keys() != columns.keys():
        raise TraceError(f"{path}: has other columns than the part before; restore it")
    for name, values in group.items():
        if values.shape[1:] != columns[name].shape[1:]:
            raise TraceError(f"{path}: column '{name}' is wider or narrower than before")
        columns[name][at : at + len(values)] = values


def _read_predictions(folder: Path, manifest: Manifest, forwards: int) -> PredictionTable:
    parts = [part for part in manifest.parts if part.table == PREDICTIONS]
    top_k = manifest.geometry.top_k
    pieces = [batch for part in parts for batch, _ in batches(folder, part, top_k)]
    if not pieces:
        raise TraceError(f"{folder}: table '{PREDICTIONS}' has no rows; record again")
    table = prediction_table(pa.Table.from_batches(pieces))
    if int(table.forward.max()) >= forwards:
        raise TraceError(
            f"{folder}: a prediction was made in forward {table.forward.max()}, but there are "
            f"{forwards}; run `oled check` on it"
        )
    return table


def prediction_table(data: pa.Table) -> PredictionTable:
    """Return rows of predictions, their lists in CSR form."""
    data = data.combine_chunks()
    experts, scores = data.column("expert_ids").chunk(0), data.column("scores").chunk(0)
    offsets, scored = (lists.offsets.to_numpy().astype(np.int64) for lists in (experts, scores))
    if not np.array_equal(offsets - offsets[0], scored - scored[0]):
        raise TraceError("a prediction's ids and scores differ in number; run `oled check` on it")
    names = data.column("predictor").unique().to_pylist()
    if len(names) > MAX_PREDICTORS:
        raise TraceError(f"{len(names)} predictors; a trace has at most {MAX_PREDICTORS}")
    code = {name: index for index, name in enumerate(names)}
    predictor = [code[name] for name in data.column("predictor").to_pylist()]
    return PredictionTable(
        forward=data.column("forward").to_numpy().copy(),
        layer=data.column("layer").to_numpy().copy(),
        target=data.column("target").to_numpy().copy(),
        predictor=np.array(predictor, dtype=np.uint8),
        offsets=offsets - offsets[0],
        expert_ids=experts.flatten().to_numpy().copy(),
        scores=scores.flatten().to_numpy().copy(),
        names=tuple(names),
    )
