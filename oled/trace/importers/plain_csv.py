"""Headerless CSV: a line for each (layer, token) with its experts, other columns as the user says.

`0,3,17,5,9` with `layer_column=1 token_column=0 id_columns=3-4`; columns count from 0, and stand
between commas, semicolons, tabs or blanks. Without `layer_column`, the lines of a token are its
layers in order; without `token_column`, a token begins where the layer does not grow; without
both, lines go round the layers that `moe_layers`, `layers` or `model` name. -1 is an unused slot.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from oled.trace.errors import TraceError
from oled.trace.importers.arrays import damage
from oled.trace.importers.cells import GAPS, Cells, source_of_cells
from oled.trace.importers.facts import FACTS, Facts
from oled.trace.importers.source import Format, Source
from oled.trace.limits import MAX_LAYERS
from oled.trace.options import OptionError, Options
from oled.trace.schema import NO_EXPERT
from oled.types import Ints

NAME = "plain_csv"
LACKS = ("confidence", "requests", "phases", "token_ids")
OPTIONS = {
    **FACTS,
    "layer_column": "column of the layer's id, from 0; else a token's lines are its layers",
    "token_column": "column of the token's number; else a token begins where the layer falls",
    "id_columns": "columns of the expert ids, as 2-9; else all the others",
    **GAPS,
}
MAX_LINE = 1 << 16


def read(path: Path, options: Options) -> Source:
    """Read all tokens as request 0."""
    table = _table(path)
    at_layer, at_token = options.integer("layer_column"), options.integer("token_column")
    ids = _experts(path, table, _id_columns(path, table.shape[1], options))
    facts = Facts.of(options)
    token = None if at_token is None else table[:, at_token]
    if at_layer is None:
        layer, token = _layers_in_turn(path, len(table), token, facts)
    else:
        layer = table[:, at_layer]
        _require(path, "layer", layer, MAX_LAYERS)
        if token is None:
            token = np.cumsum(np.diff(layer, prepend=layer[0]) <= 0) - 1
    _require(path, "token", token, 1 << 32)
    unknown = {
        "positions": at_token is None,
        "layers": at_layer is None and facts.moe_layers is None,
    }
    lacks = (*LACKS, *(word for word, lacking in unknown.items() if lacking))
    cells = Cells(layer.astype(np.int32), token, ids, None)
    return source_of_cells(NAME, path, cells, options, lacks)


FORMAT = Format(
    NAME,
    "CSV without a header: a line of expert ids for each (layer, token)",
    read,
    ("weights", *LACKS),
    OPTIONS,
)


def _table(path: Path) -> Ints:
    """Return the whole numbers of all lines: i64[R, columns]."""
    with damage(path, "lines of whole numbers"):
        with path.open("rb") as file:
            first = file.readline(MAX_LINE).decode("utf-8").strip()
        separator = next((mark for mark in ",;\t" if mark in first), " ")
        words = first.split(separator)
        if not all(re.fullmatch(r"\s*-?\d+\s*", word) for word in words):
            raise TraceError(
                f"{path}, line 1: {first!r:.60} is not a line of whole numbers: there must be no "
                f"header, and one character between two columns"
            )
        names = [str(column) for column in range(len(words))]
        table = pa.csv.read_csv(
            path,
            pa.csv.ReadOptions(column_names=names, use_threads=False),
            pa.csv.ParseOptions(delimiter=separator),
            pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.int64())),
        )
        for name in names:
            if table[name].null_count:
                row = table[name].is_null().index(True).as_py()
                raise TraceError(f"{path}, line {row + 1}: column {name} is empty: cut off?")
        return np.column_stack([table[name].to_numpy() for name in names])


def _id_columns(path: Path, width: int, options: Options) -> list[int]:
    """Return the columns of expert ids, once all that were named are there."""
    named = {key: options.integer(key) for key in ("layer_column", "token_column")}
    taken = [column for column in named.values() if column is not None]
    columns = options.integers("id_columns")
    for column in (*taken, *(columns or ())):
        if column >= width:
            raise TraceError(f"{path}: column {column} was named; a line has 0 to {width - 1}")
    found = [column for column in range(width) if column not in taken]
    found = found if columns is None else list(columns)
    if len({*taken, *found}) < len(taken) + len(found):
        raise OptionError(f"column {_repeated([*taken, *found])} is named for two things")
    if not found:
        raise TraceError(f"{path}: no column is left for expert ids")
    return found


def _repeated(columns: list[int]) -> int:
    return next(column for column in columns if columns.count(column) > 1)


def _experts(
    path: Path, table: Ints, columns: list[int]
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Return ids u16[R, k], NO_EXPERT for unused slots."""
    ids = table[:, columns]
    wrong = (ids < -1) | (ids >= NO_EXPERT)
    if wrong.any():
        row, slot = np.argwhere(wrong)[0]
        raise TraceError(
            f"{path}, row {row + 1}: column {columns[slot]}: expert {ids[row, slot]} is neither "
            f"-1 nor in 0..{NO_EXPERT - 1}"
        )
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    none = (ids < 0).all(axis=1)
    for bad, text in (
        (none, "name no expert"),
        (twice, "name an expert twice: is a column no id?"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            raise TraceError(f"{path}, row {row + 1}: ids {ids[row].tolist()!r:.60} {text}")
    return np.where(ids < 0, NO_EXPERT, ids).astype(np.uint16)


def _layers_in_turn(path: Path, rows: int, token: Ints | None, facts: Facts) -> tuple[Ints, Ints]:
    """Return layer and token of each line where a token's lines are its layers in order."""
    if token is None:
        layers = facts.moe_layers or range(facts.num_layers or 0)
        if not len(layers):
            raise TraceError(
                f"{path}: which line is of which layer? Give layer_column=…, token_column=…, "
                f"moe_layers=… or model=NAME"
            )
        if rows % len(layers):
            raise TraceError(
                f"{path}: {rows} lines are no tokens of {len(layers)} layers: cut off?"
            )
        place, token = np.arange(rows) % len(layers), np.arange(rows) // len(layers)
        return np.array(layers)[place], token
    begins = np.flatnonzero(np.append(True, np.diff(token) != 0))
    counts = np.diff(np.append(begins, rows))
    if counts.min() != counts.max():
        wrong = int(np.argmax(counts != counts[0]))
        row = int(begins[wrong])
        raise TraceError(
            f"{path}, row {row + 1}: token {token[row]} has {counts[wrong]} lines, the "
            f"first token has {counts[0]}: cut off?"
        )
    axis = np.array(facts.layer_ids(int(counts[0])))
    return axis[np.arange(rows) - np.repeat(begins, counts)], token


def _require(path: Path, what: str, values: Ints, limit: int) -> None:
    wrong = (values < 0) | (values >= limit)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise TraceError(f"{path}, row {row + 1}: {what} {values[row]} is not in 0..{limit - 1}")
