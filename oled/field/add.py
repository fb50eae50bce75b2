"""A report of one's own: a YAML file to a row of a table, with its prediction beside it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import yaml

from oled.atomic import replaced_file
from oled.errors import UserError, nearest
from oled.field.predict import Prediction, predict
from oled.field.tables import read_rows

COLUMN = {
    "id": "id",
    "machine": "group",
    "source": "source",
    "date": "date",
    "engine": "software",
    "model": "model",
    "quant": "quant",
    "bytes_per_expert_weight": "bytes_per_expert_weight",
    "gpu": "gpu",
    "gpu_gb": "gpu_mem_gb",
    "link": "pcie",
    "cpu": "cpu",
    "ram": "ram",
    "ram_gbps": "ram_gbps_stated",
    "threads": "threads",
    "experts_on_gpu": "experts_on_gpu",
    "experts_elsewhere": "experts_elsewhere",
    "context": "context",
    "batch": "batch",
    "tokens_per_second": "decode_tps",
}
"""A report's keys, and the columns of `users.csv` that they fill."""
NEEDED = ("id", "engine", "model", "quant", "gpu", "experts_on_gpu", "tokens_per_second")


def add(report: Path, table: Path) -> str:
    """Append a report to a table and return what was measured beside what is predicted.

    Raises: UserError where the report lacks a key, has an unknown one, or its id stands in the
    table already.
    """
    row = read_report(report)
    known = read_rows(table) if table.is_file() else []
    if any(other.id == row["id"] for other in known):
        raise UserError(f"{table}: has a row '{row['id']}' already; give the report another id")
    text = table.read_text(encoding="utf-8") if known else ""
    columns = text.splitlines()[0].split(",") if known else list(COLUMN.values())
    file = io.StringIO()
    file.write(text if not text or text.endswith("\n") else f"{text}\n")
    writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
    if not known:
        writer.writeheader()
    writer.writerow(row)
    with replaced_file(table) as temporary:
        temporary.write_text(file.getvalue(), encoding="utf-8")
        added = read_rows(temporary)[-1]
    return _beside(predict([added])[0])


def read_report(file: Path) -> dict[str, str]:
    """Return a report's values by the columns of `users.csv`.

    Raises: UserError.
    """
    try:
        data: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: holds no keys; needed are {', '.join(NEEDED)}")
    for key, value in data.items():
        if key not in COLUMN:
            raise UserError(f"{file}: key '{key}' is not known; {nearest(str(key), COLUMN)}")
        if isinstance(value, list | dict):
            raise UserError(f"{file}: '{key}' is not a text or a number")
    for key in NEEDED:
        if data.get(key) in (None, ""):
            raise UserError(f"{file}: '{key}' is missing")
    speed = data["tokens_per_second"]
    if isinstance(speed, bool) or not isinstance(speed, int | float) or speed <= 0:
        raise UserError(f"{file}: tokens_per_second is {speed!r}, not a number above 0")
    row = dict.fromkeys(COLUMN.values(), "")
    row |= {COLUMN[key]: "" if value is None else str(value) for key, value in data.items()}
    row["group"] = row["group"] or row["id"]
    row["experts_elsewhere"] = row["experts_elsewhere"] or "cpu"
    row["batch"] = row["batch"] or "1"
    return row


def _beside(found: Prediction) -> str:
    measured = f"measured {found.row.measured:g} tok/s"
    if found.predicted is None:
        return f"{found.row.id}: {measured}; not predicted: {found.reason}"
    inside = found.low <= found.row.measured <= found.high  # type: ignore[operator]
    return (
        f"{found.row.id}: {measured}, predicted {found.predicted:.1f} "
        f"({found.low:.1f} to {found.high:.1f}, {found.kind}): {'inside' if inside else 'outside'}"
    )
