"""What `check` found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from oled.types import Bools, Ints

RULES: dict[str, tuple[str, str]] = {
    "manifest": (
        "trace.json can be read and agrees with itself",
        "restore it or record again",
    ),
    "complete": (
        "the recording ended cleanly",
        "record again, or use what is left with allow_partial=true",
    ),
    "file": (
        "every listed part is there, readable, with the columns and rows of the manifest",
        "restore the file or record again",
    ),
    "checksum": (
        "every part has the checksum of the manifest",
        "the file was changed or damaged: restore it or record again",
    ),
    "numbering": (
        "forwards are numbered 0, 1, 2, … and their tokens 0 to T-1",
        "the tables do not belong together: restore them or record again",
    ),
    "values": (
        "phases, states, counts and flags hold known values",
        "fix the recorder or importer",
    ),
    "order": (
        "passes, blocks, steps and rows ascend; a block is not denoised after its commit",
        "sort the source, or declare the trace unordered",
    ),
    "accepted": (
        "tokens flagged as accepted add up to the forward's count, and only masked ones are "
        "accepted in denoising; no more tokens are produced than accepted",
        "fix the recorder's counts",
    ),
    "confidence": (
        "masked and decoded tokens have confidences in 0..1 where the manifest says so, and none "
        "have where it says none",
        "fix the recorder, or set confidence_kind",
    ),
    "rows_per_layer": (
        "every MoE layer has one row for each token that is no pad, except for declared gaps",
        "the recorder lost rows: record again, or declare the gap in the manifest",
    ),
    "id_range": (
        "expert ids are below the layer's number of experts (and zero experts), or 65535",
        "fix the recorder's ids or the geometry in the manifest",
    ),
    "duplicates": (
        "a token names no expert twice in a layer",
        "a buffer was not written: record again",
    ),
    "no_expert": (
        "a row that names no expert, as a token that was routed nowhere, has no weights",
        "the ids were not captured: record again, or write weights of zero",
    ),
    "weight_finite": (
        "weights are finite and not negative",
        "fix the router's output or record in a wider type",
    ),
    "weight_sum": (
        "a token's weights add up to what weight_kind says, within bf16 rounding (0.4 %)",
        "record the applied weights, or correct weight_kind and weight_sum",
    ),
    "zero_capture": (
        "no layer's rows are all zeros",
        "the router of this layer was not captured: record again",
    ),
    "side_tables": (
        "predictions and scores name known forwards, layers and experts, with finite values",
        "fix the recorder",
    ),
}
"""Name of a rule: what must hold, and what to do where it does not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One breach of a rule, as near to its place as it is known."""

    rule: str
    file: str
    message: str
    row: int | None = None  # in the file, from 0
    layer: int | None = None  # absolute
    value: str | None = None

    @property
    def advice(self) -> str:
        """What to do."""
        return RULES[self.rule][1]

    def __str__(self) -> str:
        where = self.file
        if self.row is not None:
            where += f", row {self.row}"
        if self.layer is not None:
            where += f", layer {self.layer}"
        return f"{where}: {self.message} [{self.rule}]; {self.advice}"


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on a trace."""

    path: str
    status: str
    findings: tuple[Finding, ...]  # the first few of each rule
    breaches: dict[str, int]  # all of them, by rule
    requests: int = 0
    planned_requests: int | None = None  # None: the trace does not say
    forwards: int = 0
    tokens: int = 0
    routing_rows: int = 0
    pad_tokens: int = 0
    notes: tuple[str, ...] = ()  # no faults, but worth knowing: gaps, what the source lacks
    warnings: tuple[str, ...] = ()  # no rule is broken, but the capture is likely wrong

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.breaches

    def to_json(self) -> dict[str, Any]:
        """Return what `oled check --json` prints."""
        findings = [{**asdict(finding), "advice": finding.advice} for finding in self.findings]
        said = {"notes": list(self.notes), "warnings": list(self.warnings)}
        return {**asdict(self), "ok": self.ok, "findings": findings, **said}

    def lines(self) -> list[str]:
        """Return the findings, then one line of summary, for people."""
        lines = [str(finding) for finding in self.findings]
        for rule, count in self.breaches.items():
            shown = sum(finding.rule == rule for finding in self.findings)
            if count > shown:
                lines.append(f"… and {count - shown} more [{rule}]")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"warning: {warning}" for warning in self.warnings]
        pads = f" ({self.pad_tokens} pads)" if self.pad_tokens else ""
        size = f"{self.forwards} forwards, {self.tokens} tokens{pads}, {self.routing_rows} rows"
        verdict = "whole" if self.ok else f"{sum(self.breaches.values())} breaches"
        if self.warnings:
            count = len(self.warnings)
            verdict += f", but look at {count} warning{'s' if count > 1 else ''} first"
        if self.status == "partial" and self.planned_requests is not None:
            size = f"{self.requests} of {self.planned_requests} requests, {size}"
        lines.append(f"{self.path}: {self.status}, {size}: {verdict}")
        return lines


Locate = Callable[[int], tuple[str, int]]
"""From the index of a row to its file and the row in it."""
Say = Callable[[int], tuple[str, int | None, str]]
"""From the index of a row to what is wrong, in which layer, and the value."""


@dataclass(slots=True)
class Collector:
    """Gathers findings, keeping the first `limit` of each rule."""

    limit: int = 5
    findings: list[Finding] = field(default_factory=list)
    breaches: dict[str, int] = field(default_factory=dict)

    def add(self, finding: Finding, times: int = 1) -> None:
        """Add one finding, which may stand for several breaches."""
        before = self.breaches.get(finding.rule, 0)
        self.breaches[finding.rule] = before + times
        if sum(known.rule == finding.rule for known in self.findings) < self.limit:
            self.findings.append(finding)

    def add_rows(self, rule: str, wrong: Bools, locate: Locate, say: Say) -> None:
        """Add a finding for each wrong row; places and words are made for the first few only."""
        rows = np.flatnonzero(wrong)
        for index in rows[: self.limit]:
            file, row = locate(int(index))
            message, layer, value = say(int(index))
            self.add(Finding(rule, file, message, row, layer, value))
        if len(rows) > self.limit:
            self.breaches[rule] += len(rows) - self.limit


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows of (forward, layer, …) that follow each other in one file, and where to report them."""

    found: Collector
    file: str
    start: int  # row in the file of the first
    forward: Ints
    layer: Ints
    token: Ints | None = None

    def report(
        self,
        rule: str,
        wrong: Bools,
        text: Callable[[int], str],
        value: Callable[[int], object],
    ) -> None:
        """Report a finding for each wrong row."""

        def say(i: int) -> tuple[str, int, str]:
            token = "" if self.token is None else f", token {self.token[i]}"
            message = f"forward {self.forward[i]}{token}: {text(i)}"
            return message, int(self.layer[i]), str(value(i))

        self.found.add_rows(rule, wrong, lambda i: (self.file, self.start + i), say)
