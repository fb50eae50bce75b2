"""A million parts, and tables that do not fit: refused at once, with both numbers."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from damage import refused, rewrite
from small import diffusion, edit_manifest, geometry, manifest, write

from oled.trace.check import check
from oled.trace.limits import MAX_MANIFEST_BYTES, MAX_PARTS, available_bytes

SHAPE = geometry()
ROUTING, FORWARDS, TOKENS = (f"{t}-00000.parquet" for t in ("routing", "forwards", "tokens"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))


def test_a_million_parts_are_refused_at_once(folder: Path) -> None:
    part = b'{"table": "routing", "file": "routing-000000.parquet", "rows": 1, "sha256": "%s"},\n'
    text = part % (b"0" * 64) * 10**6
    assert len(text) > MAX_MANIFEST_BYTES
    (folder / "trace.json").write_bytes(b'{"parts": [' + text)
    began = time.monotonic()
    refused(folder, f"a manifest has at most {MAX_MANIFEST_BYTES} ", "manifest")
    assert time.monotonic() - began < 2


def test_more_parts_than_a_trace_may_have(folder: Path) -> None:
    one = {"table": "routing", "rows": 1, "sha256": ""}
    parts = [{**one, "file": f"{n}.parquet"} for n in range(MAX_PARTS + 1)]
    edit_manifest(folder, lambda data: data.update(parts=parts))
    began = time.monotonic()
    refused(folder, f"{MAX_PARTS + 1} parts; a trace has at most {MAX_PARTS}", "manifest")
    assert time.monotonic() - began < 10


def test_stray_files_are_not_all_named(folder: Path) -> None:
    for number in range(300):
        (folder / f"stray-{number}.parquet").touch()
    (note,) = check(folder).notes
    assert len(note) < 250
    assert note.endswith("and 295 more")


# --- size -----------------------------------------------------------------------------------------


def test_more_than_fits_into_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_bytes()
    assert free is not None
    assert 1 << 20 < free < 1 << 50
    monkeypatch.setattr("oled.trace.limits.available_bytes", lambda: 1000)
    refused(folder, "in memory, .* are free; cut it with `oled slice`")


def test_tables_that_unfold(folder: Path, tmp_path: Path) -> None:
    """Millions of rows of one value in a few kilobytes: judged by their number."""
    rows = 4_000_000

    def unfold(table: pa.Table) -> pa.Table:
        return pa.table(
            [pa.repeat(table.column(name)[0], rows) for name in table.column_names],
            schema=table.schema,
        )

    rewrite(folder, TOKENS, unfold)
    assert (folder / TOKENS).stat().st_size < 1 << 20
    refused(folder, "4000000 token rows, but the forwards add up to", "numbering")
