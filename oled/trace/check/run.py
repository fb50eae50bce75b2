"""`check`: prove a trace whole, or say where it is not.

The routing is streamed by row group; what is kept in memory grows with forwards and tokens only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from oled.trace.check.counts import Expected
from oled.trace.check.report import Collector, Finding, Report
from oled.trace.check.rows import RoutingCheck
from oled.trace.check.side import check_predictions, check_scores
from oled.trace.check.tables import check_forwards, check_tokens, locator
from oled.trace.errors import TraceError
from oled.trace.files import file_sha256, open_part, unlisted_files
from oled.trace.manifest import Manifest, Status, read_manifest
from oled.trace.reader import offsets_of, partial_message, read_columns, some
from oled.trace.schema import TokenState
from oled.trace.tables import (
    FORWARDS,
    PREDICTIONS,
    REQUIRED_TABLES,
    ROUTING,
    SCORES,
    TABLES,
    TOKENS,
)


def check(path: str | Path) -> Report:
    """Check every rule of `report.RULES` on a trace folder; a wrong trace raises nothing."""
    folder = Path(path)
    found = Collector()
    try:
        manifest = read_manifest(folder)
    except TraceError as error:
        found.add(Finding("manifest", "trace.json", str(error)))
        return Report(str(folder), "unreadable", tuple(found.findings), found.breaches)
    if manifest.status is Status.PARTIAL:
        found.add(Finding("complete", "trace.json", partial_message(folder, manifest)))
    report = Report(
        str(folder),
        manifest.status.value,
        (),
        {},
        planned_requests=len(manifest.prompts) or None,
        notes=_notes(folder, manifest),
    )
    if _check_files(folder, manifest, found):
        try:
            report = _check_tables(folder, manifest, found, report)
        except TraceError as error:  # a part that turned out to be damaged, or too large
            found.add(Finding("file", "trace.json", str(error)))
    return replace(report, findings=tuple(found.findings), breaches=found.breaches)


def _notes(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    notes = [
        f"declared gap: layer {gap.layer}, {gap.phase.name.lower()}, kept: {gap.kept} "
        f"({gap.reason})"
        for gap in manifest.gaps
    ]
    if manifest.lacks:
        notes.append(f"the source lacks {', '.join(manifest.lacks)}")
    unlisted = unlisted_files(folder, {part.file for part in manifest.parts})
    if unlisted:
        notes.append(f"files that belong to no closed part: {some(unlisted)}")
    return tuple(notes)


def _check_files(folder: Path, manifest: Manifest, found: Collector) -> bool:
    """Return whether every part can be read on."""
    readable = True
    for part in manifest.parts:
        try:
            if part.table not in TABLES:
                raise TraceError(f"{part.file}: there is no table '{part.table}'")
            open_part(folder, part, manifest.geometry.top_k)
        except TraceError as error:
            found.add(Finding("file", part.file, str(error)))
            readable = False
        else:
            if file_sha256(folder / part.file) != part.sha256:
                found.add(Finding("checksum", part.file, "its checksum is not the manifest's"))
    present = {part.table for part in manifest.parts}
    for table in REQUIRED_TABLES:
        if table not in present:
            found.add(Finding("file", "trace.json", f"no part of table '{table}' is listed"))
            readable = False
    return readable


def _check_tables(folder: Path, manifest: Manifest, found: Collector, report: Report) -> Report:
    parts = {table: [part for part in manifest.parts if part.table == table] for table in TABLES}
    forwards = read_columns(folder, manifest, FORWARDS)
    check_forwards(forwards, manifest, locator(parts[FORWARDS]), found)
    counts = forwards["tokens"].astype(np.int64)
    offsets = offsets_of(counts)
    tokens = read_columns(folder, manifest, TOKENS)
    rows = len(tokens["token"])
    pad = tokens["state"] == TokenState.PAD
    report = replace(
        report,
        requests=len(np.unique(forwards["request"])),
        forwards=len(counts),
        tokens=rows,
        pad_tokens=int(pad.sum()),
    )
    if rows != offsets[-1]:
        text = f"{rows} token rows, but the forwards add up to {offsets[-1]} tokens"
        found.add(Finding("numbering", TOKENS, text))
        return report  # without these the routing rows can not be judged
    check_tokens(tokens, forwards, offsets, manifest, locator(parts[TOKENS]), found)
    expected = Expected(counts, forwards["phase"], forwards["request"], offsets, pad)
    routing = RoutingCheck(folder, manifest, expected, found)
    routing.run(parts[ROUTING])
    for part in parts[PREDICTIONS]:
        check_predictions(folder, manifest, part, expected, found)
    for part in parts[SCORES]:
        check_scores(folder, manifest, part, expected, found)
    return replace(
        report,
        routing_rows=routing.rows,
        notes=(*report.notes, *routing.suspects.notes()),
        warnings=routing.suspects.warnings(),
    )
