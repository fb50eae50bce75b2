"""route_trace v1 of BigMoeOnEdge (Helldez/BigMoeOnEdge): CSV with a commented header.

Header: the format, then model and sizes, then one line per layer with the bytes of its experts.
Columns: turn, phase (0 prefill, 1 decode), step (token), layer, slot, expert, weight, residency,
expert_bytes. The engine runs the prompt through a layer at once, so a turn's prefill becomes one
forward of all its tokens; every decoded token is a forward. llama.cpp prunes the last layer to the
last prompt token: a declared gap. What the engine's own cache did (residency, bytes read) is not
kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.importers.arrays import damage
from oled.trace.importers.records import plain_record, row_tokens
from oled.trace.importers.source import Format, Source, provenance
from oled.trace.limits import require_memory
from oled.trace.manifest import Gap, Kept, Manifest
from oled.trace.options import Options
from oled.trace.schema import (
    NO_EXPERT,
    ConfidenceKind,
    ForwardRecord,
    Geometry,
    Phase,
    WeightKind,
)
from oled.types import Bools, Doubles, ExpertIds, Floats, Ints

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
NAME = "bigmoeonedge"
LACKS = ("confidence", "token_ids")
TURN, PHASE, STEP, LAYER, SLOT, EXPERT, WEIGHT = range(7)
PREFILL, DECODE = 0, 1
MAX_STEP = 1 << 31


def read(path: Path, options: Options) -> Source:
    """Read the conversation as request 0."""
    header, table, first_line = _parse(path)
    _validate(path, header, table, first_line)
    # by turn, phase, then decoded token (a prefill is one forward)
    forward = np.where(table[:, PHASE] == PREFILL, -1, table[:, STEP])
    order = np.lexsort((table[:, SLOT], table[:, LAYER], table[:, STEP], forward, table[:, TURN]))
    table, forward = table[order], forward[order]
    new = (np.diff(table[:, TURN]) != 0) | (np.diff(forward) != 0)
    pieces = np.split(table, np.flatnonzero(new) + 1)
    cubes = [_Cube.of(path, header, piece) for piece in pieces]
    manifest = Manifest(
        geometry=header.geometry,
        weight_kind=WeightKind.SUM_ONE,
        confidence_kind=ConfidenceKind.NONE,
        model={"id": header.model, "revision": None, "dtype": "gguf"},
        decode={"mode": "autoregressive"},
        provenance={**provenance(NAME, path), "dense_bytes": list(header.dense_bytes)},
        gaps=tuple(_gaps(header, cubes)),
        lacks=LACKS,
    )
    return Source(manifest, _records(cubes))


FORMAT = Format(
    NAME,
    "route_trace v1 of BigMoeOnEdge: CSV with ids, weights and bytes of each layer's experts",
    read,
    LACKS,
)


@dataclass(frozen=True, slots=True)
class _Header:
    model: str
    geometry: Geometry
    dense_bytes: tuple[int, ...]


def _parse(path: Path) -> tuple[_Header, Doubles, int]:
    """Return header, rows, and the line number of the first row."""
    with damage(path, "text"):
        lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0].strip() != "# route_trace v1":
        raise TraceError(f"{path}, line 1: not '# route_trace v1'")
    comments = [line for line in lines if line.startswith("#")]
    first = len(comments) + 1  # after the comments and the names of the columns
    if len(lines) <= first or lines[first - 1].strip() != COLUMNS:
        raise TraceError(f"{path}, line {first}: expected the columns {COLUMNS}, then rows")
    rows = []
    for number, line in enumerate(lines[first:], first + 1):
        try:
            row = [float(cell) for cell in line.split(",")]
        except ValueError:
            raise TraceError(f"{path}, line {number}: '{line}' is not all numbers") from None
        if len(row) != COLUMNS.count(",") + 1:
            raise TraceError(f"{path}, line {number}: {len(row)} values, not 9: cut off?")
        rows.append(row)
    return _header(path, comments), np.array(rows), first + 1


def _header(path: Path, comments: list[str]) -> _Header:
    text = "\n".join(comments)
    model = re.search(r"model=(\S+)", text)
    sizes = {}
    for key in ("n_layer", "n_expert", "n_expert_used"):
        found = re.search(rf"\b{key}=(\d+)", text)
        if found is None:
            raise TraceError(f"{path}: the header lacks {key}=…")
        sizes[key] = int(found[1])
    layers = re.findall(r"^# layer=(\d+) expert_bytes=(\d+) dense_bytes=(\d+)", text, re.MULTILINE)
    numbers = [int(layer) for layer, _, _ in layers]
    if numbers != list(range(len(layers))) or len(layers) != sizes["n_layer"]:
        raise TraceError(
            f"{path}: the header describes {len(layers)} layers, not 0 to {sizes['n_layer'] - 1}"
        )
    geometry = Geometry(
        moe_layers=tuple(range(sizes["n_layer"])),
        experts_per_layer=(sizes["n_expert"],) * sizes["n_layer"],
        top_k=sizes["n_expert_used"],
        expert_bytes=tuple(int(size) for _, size, _ in layers),
        num_layers=sizes["n_layer"],
    )
    name = Path(model[1]).name if model else "unknown"
    return _Header(name, geometry, tuple(int(size) for _, _, size in layers))


def _validate(path: Path, header: _Header, table: Doubles, first_line: int) -> None:
    """Refuse numbers that are not whole or out of range, and a cell named twice."""
    shape = header.geometry
    for column, name, limit in (
        (TURN, "turn", MAX_STEP),
        (PHASE, "phase", DECODE + 1),
        (STEP, "step", MAX_STEP),
        (LAYER, "layer", shape.num_layers),
        (SLOT, "slot", shape.top_k),
        (EXPERT, "expert", shape.experts_per_layer[0]),
    ):
        values = table[:, column]
        # written so that NaN is wrong, too
        wrong = ~((values >= 0) & (values < limit) & (values == np.floor(values)))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise TraceError(
                f"{path}, line {first_line + row}: {name} {values[row]:g} is not a whole number "
                f"from 0 to {limit - 1} (layer {table[row, LAYER]:g})"
            )
    weight = table[:, WEIGHT]
    if not np.isfinite(weight).all():
        row = int(np.argmin(np.isfinite(weight)))
        raise TraceError(
            f"{path}, line {first_line + row}: weight {weight[row]} (layer {table[row, LAYER]:g})"
        )
    cells = table[:, [TURN, STEP, LAYER, SLOT]]
    _, first = np.unique(cells, axis=0, return_index=True)
    again = np.ones(len(cells), dtype=bool)
    again[first] = False
    if again.any():
        row = int(np.argmax(again))
        raise TraceError(f"{path}, line {first_line + row}: this slot occurs twice")


@dataclass(frozen=True, slots=True, eq=False)
class _Cube:
    """One forward: [L, T, k], and which (layer, token) cells are there."""

    phase: Phase
    steps: Ints  # [T]
    expert_ids: ExpertIds
    weights: Floats
    present: Bools  # [L, T]

    @classmethod
    def of(cls, path: Path, header: _Header, rows: Doubles) -> _Cube:
        whole = rows[:, : EXPERT + 1].astype(np.int64)
        steps, token = np.unique(whole[:, STEP], return_inverse=True)
        shape = (header.geometry.num_layers, len(steps), header.geometry.top_k)
        require_memory(6 * math.prod(shape), f"{path}: a forward of {len(steps)} tokens")
        ids = np.full(shape, NO_EXPERT, dtype=np.uint16)
        weights = np.zeros(shape, dtype=np.float32)
        place = (whole[:, LAYER], token, whole[:, SLOT])
        ids[place] = whole[:, EXPERT]
        weights[place] = rows[:, WEIGHT]
        present = (ids != NO_EXPERT).any(axis=2)
        phase = Phase.PREFILL if whole[0, PHASE] == PREFILL else Phase.DECODE
        missing = np.argwhere(~present)
        if len(missing) and phase is Phase.DECODE:
            raise TraceError(
                f"{path}: step {steps[missing[0, 1]]} has no rows of layer {missing[0, 0]}: "
                f"cut off?"
            )
        return cls(phase, steps, ids, weights, present)


def _gaps(header: _Header, cubes: list[_Cube]) -> Iterator[Gap]:
    """Yield layers without rows for some prompt tokens."""
    prefills = [cube.present for cube in cubes if cube.phase is Phase.PREFILL]
    for layer in header.geometry.moe_layers:
        if all(present[layer].all() for present in prefills):
            continue
        only_last = all(present[layer, -1] and present[layer].sum() == 1 for present in prefills)
        kept = Kept.LAST_TOKEN if only_last else Kept.SOME
        reason = "the engine prunes prompt tokens whose output nobody reads"
        yield Gap(layer, Phase.PREFILL, kept, reason)


def _records(cubes: list[_Cube]) -> Iterator[ForwardRecord]:
    layers = np.arange(cubes[0].expert_ids.shape[0])
    for pass_id, cube in enumerate(cubes):
        accepted = np.zeros(len(cube.steps), dtype=np.uint8)
        accepted[-1] = 1  # the token chosen after the last one
        yield plain_record(
            pass_id,
            cube.phase,
            layers,
            cube.expert_ids,
            weights=cube.weights,
            positions=cube.steps,
            context=int(cube.steps[0]),
            accepted=accepted,
            produced=int(cube.phase is Phase.DECODE),
            row_tokens=row_tokens(cube.present),
        )
