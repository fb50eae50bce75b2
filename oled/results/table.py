"""Results tables: one row a configuration, failed ones included, in one Parquet file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from oled.atomic import replaced_file, write_text
from oled.errors import UserError

METRICS, JOB, TABLE = "metrics.json", "job.json", "results.parquet"
OVERRIDES = ".hydra/overrides.yaml"

SHOWN = {  # column: (heading, divisor, format)
    "tpot_ns": ("TPOT ms", 1e6, "{:.3f}"),
    "ttft_ns": ("TTFT ms", 1e6, "{:.2f}"),
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
    """Write one row a configuration: a reader sees the whole table or none."""
    table = pd.DataFrame(list(rows))
    with replaced_file(file) as temporary:
        table.to_parquet(temporary, index=False)
    return table


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
    return done.reset_index(drop=True)


def configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that say what was simulated, from a composed configuration."""
    cache = config["cache"]
    return {
        "trace": config["trace"]["path"],
        "policy": config["policy"]["name"],
        "slots": str(cache["slots"]),
        "scope": cache["scope"],
        "staging": str(cache["staging"]),
        "lifecycle": cache["lifecycle"],
        "batch_size": config["workload"]["batch_size"],
        "hardware": config["hardware"]["name"],
        "runtime": config["runtime"]["name"],
        **config["cost"],
        "seed": config["seed"],
    }


def claim(folder: Path) -> int:
    """Two sweeps at once would lose each other's rows: refuses a folder that one is writing to.

    The claim lasts until the returned file descriptor is closed, or the process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(
            f"{folder}: another sweep is writing here; wait for it, or choose another out=DIR"
        ) from error
    return handle


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """`folder` is claimed inside."""
    handle = claim(folder)
    try:
        yield
    finally:
        os.close(handle)


def clear_sweep(folder: Path) -> None:
    """Removes the results of an older sweep, so that two are never mixed."""
    (folder / TABLE).unlink(missing_ok=True)
    for job in _jobs(folder):
        for file in (METRICS, JOB, OVERRIDES):
            (job / file).unlink(missing_ok=True)


def _jobs(folder: Path) -> list[Path]:
    """The numbered folders in which Hydra or a job of ours left something."""
    if not folder.is_dir():
        return []
    numbered = [path for path in folder.iterdir() if path.name.isdigit()]
    return [path for path in numbered if (path / ".hydra").is_dir() or (path / JOB).is_file()]


def gather_sweep(folder: Path) -> pd.DataFrame:
    """The table of a Hydra sweep's job folders: overrides, configuration, metrics or error.

    Jobs are numbered from 0: one of which nothing is left is a failed row, not a missing one.
    """
    left = [
        int(job.name)
        for job in _jobs(folder)
        if any((job / file).is_file() for file in (METRICS, JOB, OVERRIDES))
    ]
    numbers = range(max(left, default=-1) + 1)
    return write_table([_job_row(folder / str(number)) for number in numbers], folder / TABLE)


def _job_row(job: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"job": int(job.name), "overrides": "", "error": "the job did not end"}
    if not (job / OVERRIDES).is_file():
        return row | {"error": "the job left no record of its configuration: run the sweep again"}
    config = yaml.safe_load((job / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
    row["overrides"] = " ".join(yaml.safe_load((job / OVERRIDES).read_text(encoding="utf-8")))
    row |= configuration(config) if "policy" in config else {}
    if (job / JOB).is_file():
        row["error"] = json.loads((job / JOB).read_text(encoding="utf-8"))["error"]
    if row["error"] is None and (job / METRICS).is_file():
        row |= flatten(json.loads((job / METRICS).read_text(encoding="utf-8")))
    return row


def as_text(table: pd.DataFrame, columns: Iterable[str] = ("policy", "slots")) -> str:
    """The table for people: what was simulated, the main metrics, and what failed."""
    shown = table[list(columns)].astype(str)
    for column, (heading, divisor, form) in SHOWN.items():
        if column in table:
            shown[heading] = [
                "-" if pd.isna(value) else form.format(value / divisor) for value in table[column]
            ]
    return shown.to_string(index=False)


REFERENCES = {
    "ideal": "ideal: every expert a hit",
    "all_resident": "all experts resident",
    "bound_relaxed": "lower bound",
    "ref_belady_uniform": "Belady, every miss copied",
}


def comparison(table: pd.DataFrame) -> str:
    """Policies against cache sizes, references below: TPOT in ms and over the ideal, hit rate."""
    sizes = list(dict.fromkeys(table["slots"]))
    width = 26
    head = "".join(
        f"{f'{size} slots: TPOT ms':>20}{'x ideal':>9}{'hit rate':>10}" for size in sizes
    )
    lines = [f"{'policy':{width}}{head}"]
    for policy in dict.fromkeys(table["policy"]):
        rows = [table[(table["policy"] == policy) & (table["slots"] == size)] for size in sizes]
        lines.append(f"{policy:{width}}{''.join(_cells(row, '') for row in rows)}")
    for name, text in REFERENCES.items():
        if f"{name}_tpot_ns" in table:
            rows = [table[table["slots"] == size].head(1) for size in sizes]
            lines.append(f"{text:{width}}{''.join(_cells(row, f'{name}_') for row in rows)}")
    return "\n".join(lines)


def _cells(row: pd.DataFrame, prefix: str) -> str:
    """One configuration's TPOT, its ratio to the ideal and its hit rate."""
    if row.empty:
        return " " * 39
    first = row.iloc[0]
    tpot = first[f"{prefix}tpot_ns"]
    hit = f"{prefix}hit_rate"
    hits = f"{first[hit]:.3f}" if hit in row else "-"
    return f"{tpot / 1e6:20.3f}{tpot / first['ideal_tpot_ns']:9.2f}{hits:>10}"
