"""Results tables: one row a configuration, failed ones included, in one Parquet file."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from oled.atomic import replaced_file, write_text
from oled.errors import UserError
from oled.hardware.labels import advice
from oled.results.text import aligned
from oled.sim.settings import SETTINGS

log = logging.getLogger("oled")

METRICS, TABLE = "metrics.json", "results.parquet"

_COLUMNS = {one.name: one.field for one in SETTINGS}

SHOWN = {  # column: (heading, divisor, format)
    "tpot_ns": ("TPOT ms", 1e6, "{:.3f}"),
    "prefill_ns": ("prefill ms", 1e6, "{:.2f}"),
    "hit_rate": ("hit rate", 1.0, "{:.3f}"),
    "h2d_bytes": ("copied GiB", 2**30, "{:.2f}"),
    "cpu_executions": ("on CPU", 1.0, "{:.0f}"),
}


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings become dotted columns; lists become JSON text."""
    row: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            row |= flatten(value, f"{prefix}{key}.")
        else:
            row[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return row


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as JSON: a reader sees all of it or none."""
    write_text(file, json.dumps(data, indent=2, sort_keys=True) + "\n")


def write_table(rows: Iterable[Mapping[str, Any]], file: Path) -> pd.DataFrame:
    """Write one row a configuration, and return the table."""
    table = pd.DataFrame(list(rows))
    save_table(table, file)
    return table


def save_table(table: pd.DataFrame, file: Path) -> None:
    """Write a table: a reader sees all of it or none."""
    with replaced_file(file) as temporary:
        table.to_parquet(temporary, index=False)


def read_table(path: str | Path) -> pd.DataFrame:
    """The rows that did not fail, from a results table or the folder that holds one."""
    file = Path(path)
    if file.is_dir():
        file = file / TABLE
    if not file.is_file():
        raise UserError(f"{file}: there is no results table; `oled simulate -m …` writes one")
    try:
        table = pd.read_parquet(file)
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: not readable as Parquet: {error}") from error
    done = table[table["error"].isna()] if "error" in table else table
    if done.empty:
        raise UserError(f"{file}: no configuration in it succeeded")
    return _in_present_names(done.reset_index(drop=True), file)


_BEFORE = {
    "ttft_ns": "prefill_ns",
    "h2d_bytes_per_token": "decode_h2d_bytes_per_token",
    "undrafted_h2d_bytes_per_token": "undrafted_decode_h2d_bytes_per_token",
}
"""Names of metrics in tables that were written before docs/metrics.md."""


def _in_present_names(table: pd.DataFrame, file: Path) -> pd.DataFrame:
    """An older table under the names of today, with a note; its counts are of all forwards."""
    if "prefill_ns" in table or "ttft_ns" not in table:
        return table
    log.info(
        "%s: an older table: ttft_ns is read as prefill_ns, h2d_bytes_per_token as "
        "decode_h2d_bytes_per_token; its hit rates and counts are of prefill too",
        file,
    )
    return table.set_axis([_BEFORE.get(name, name) for name in table.columns], axis="columns")


def column_of(key: str) -> str:
    """Return the column that holds a key of a simulation: `cache.slots` is in `slots`."""
    return _COLUMNS.get(key, key)


def failures(table: pd.DataFrame) -> list[str]:
    """Return a line for each row that failed."""
    failed = table[table["error"].notna()] if "error" in table else table[:0]
    return [f"{row.overrides} failed: {row.error}" for row in failed.itertuples()]


def as_text(table: pd.DataFrame, columns: Iterable[str] = ("policy", "slots")) -> str:
    """The table for people: what was simulated, the main metrics, and what failed."""
    shown = table[list(columns)].astype(str)
    for column, (heading, divisor, form) in SHOWN.items():
        if column in table:
            shown[heading] = [
                "-" if pd.isna(value) else form.format(value / divisor) for value in table[column]
            ]
    return "\n".join([shown.to_string(index=False), *_notes(table)])


def _notes(table: pd.DataFrame) -> list[str]:
    """Return each label of the rows once, with the number of rows, and what to add."""
    if "provenance.labels" not in table:
        return []
    said = [json.loads(text) for text in table["provenance.labels"].dropna()]
    counts = Counter(label for labels in said for label in dict.fromkeys(labels))
    notes = [f"note  {label} ({n} of {len(table)} rows)" for label, n in counts.items()]
    return [*notes, *(f"advice  {text}" for text in advice(counts))]


REFERENCES = {
    "ideal": "ideal: every expert a hit",
    "all_resident": "all experts resident",
    "bound_relaxed": "lower bound",
    "ref_belady_uniform": "Belady of demand policies",
}


def comparison(table: pd.DataFrame) -> str:
    """Policies against cache sizes, references below: TPOT in ms and over the ideal, hit rate."""
    sizes = list(dict.fromkeys(table["slots"]))
    headers = ["policy"]
    for size in sizes:
        headers += [f"{size} slots: TPOT ms", "x ideal", "hit rate"]
    rows = []
    for policy in dict.fromkeys(table["policy"]):
        of_policy = table[table["policy"] == policy]
        rows.append([policy, *_cells(of_policy, sizes, "")])
    for name, text in REFERENCES.items():
        if f"{name}_tpot_ns" in table:
            rows.append([text, *_cells(table, sizes, f"{name}_")])
    return aligned(rows, headers, right=1)


def _cells(rows: pd.DataFrame, sizes: Iterable[str], prefix: str) -> list[str]:
    """Return TPOT, its ratio to the ideal and the hit rate at each size, from its first row."""
    cells = []
    for size in sizes:
        row = rows[rows["slots"] == size]
        if row.empty:
            cells += [""] * 3
            continue
        first = row.iloc[0]
        tpot, hit = first[f"{prefix}tpot_ns"], f"{prefix}hit_rate"
        hits = f"{first[hit]:.3f}" if hit in row else "-"
        cells += [f"{tpot / 1e6:.3f}", f"{tpot / first['ideal_tpot_ns']:.2f}", hits]
    return cells
