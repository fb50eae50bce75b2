"""`trace.json`: what a trace is of, how it was made, and which files hold it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, brief, parse_json
from oled.trace.limits import MAX_MANIFEST_BYTES, MAX_PARTS
from oled.trace.migrate import SCHEMA_VERSION, migrate_manifest
from oled.trace.schema import ConfidenceKind, Geometry, Phase, WeightKind

MANIFEST = "trace.json"


class Status(StrEnum):
    """`complete` only after a clean end."""

    PARTIAL = "partial"
    COMPLETE = "complete"


class Kept(StrEnum):
    """Which tokens of a layer have rows although others are missing on purpose."""

    LAST_TOKEN = "last_token"
    SOME = "some"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that are missing by design, such as a last layer pruned for prompt tokens."""

    layer: int  # absolute
    phase: Phase
    kept: Kept
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return JSON types, the phase by its name in small letters."""
        return {**asdict(self), "phase": self.phase.name.lower()}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Read `to_json`'s form."""
        fields = JsonFields(data, where)
        phase = fields.get("phase", str)
        if phase.upper() not in Phase.__members__:
            known = ", ".join(name.lower() for name in Phase.__members__)
            raise TraceError(f"{where}: 'phase' is {brief(phase)}; known: {known}")
        return cls(
            fields.get("layer", int),
            Phase[phase.upper()],
            fields.choice("kept", Kept),
            fields.get("reason", str),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A closed Parquet file of one table."""

    table: str
    file: str
    rows: int
    sha256: str
    version: int = SCHEMA_VERSION  # of the schema its columns follow; the manifest says it once

    def __post_init__(self) -> None:
        # a name alone, so that no part lies outside the folder
        if not re.fullmatch(r"[\w.-]+\.parquet", self.file):
            raise TraceError(
                f"manifest: part file {brief(self.file)} is not a plain name in the folder"
            )
        if self.rows < 0:
            raise TraceError(f"manifest: part {brief(self.file)} has {self.rows} rows")

    def to_json(self) -> dict[str, Any]:
        """Return JSON types, without the version."""
        return {
            "table": self.table,
            "file": self.file,
            "rows": self.rows,
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, data: Any, where: str, version: int = SCHEMA_VERSION) -> Self:
        """Read `to_json`'s form."""
        fields = JsonFields(data, where)
        return cls(
            fields.get("table", str),
            fields.get("file", str),
            fields.get("rows", int),
            fields.get("sha256", str),
            version,
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a trace that is not in its tables."""

    geometry: Geometry
    weight_kind: WeightKind
    confidence_kind: ConfidenceKind
    weight_sum: float | None = None  # of SCALED_SUM
    model: dict[str, Any] = field(default_factory=dict)  # id, revision, dtype
    tokenizer: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)  # mode, block_length, threshold, …
    seed: int | None = None
    prompts: tuple[dict[str, Any], ...] = ()  # hash and source of each request's prompt
    provenance: dict[str, Any] = field(default_factory=dict)  # device, versions, commit, date
    gaps: tuple[Gap, ...] = ()
    ordered: bool = True  # False where the order of forwards was lost
    lacks: tuple[str, ...] = ()  # what the source did not hold: weights, order, confidence, …
    parts: tuple[Part, ...] = ()
    status: Status = Status.PARTIAL

    def __post_init__(self) -> None:
        if (self.weight_kind is WeightKind.SCALED_SUM) != (self.weight_sum is not None):
            raise TraceError(
                f"manifest: 'weight_sum' is {self.weight_sum} for weight_kind "
                f"'{self.weight_kind}'; it belongs to 'scaled_sum' alone"
            )
        if self.weight_sum is not None and not 0 < self.weight_sum < math.inf:
            raise TraceError(f"manifest: 'weight_sum' is {self.weight_sum}")
        files = {part.file for part in self.parts}
        if len(files) < len(self.parts):
            raise TraceError("manifest: a part is listed twice")
        for gap in self.gaps:
            if gap.layer not in self.geometry.moe_layers:
                raise TraceError(f"manifest: gap at layer {gap.layer}, which is no MoE layer")

    @property
    def has_weights(self) -> bool:
        """Whether the stored weights mean anything."""
        return self.weight_kind is not WeightKind.NONE

    @property
    def has_confidence(self) -> bool:
        """Whether the stored confidences mean anything."""
        return self.confidence_kind is not ConfidenceKind.NONE

    @property
    def expected_weight_sum(self) -> float | None:
        """What a token's weights must add up to, or None where any sum is right."""
        match self.weight_kind:
            case WeightKind.SUM_ONE | WeightKind.SOFTMAX_SELECTED:
                return 1.0
            case WeightKind.SCALED_SUM:
                return self.weight_sum
            case _:
                return None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types, in the order in which a person wants to read them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status.value,
            "model": self.model,
            "tokenizer": self.tokenizer,
            "decode": self.decode,
            "seed": self.seed,
            "weight_kind": self.weight_kind.value,
            "weight_sum": self.weight_sum,
            "confidence_kind": self.confidence_kind.value,
            "ordered": self.ordered,
            "lacks": list(self.lacks),
            "gaps": [gap.to_json() for gap in self.gaps],
            "geometry": self.geometry.to_json(),
            "prompts": list(self.prompts),
            "provenance": self.provenance,
            "parts": [part.to_json() for part in self.parts],
        }

    @classmethod
    def from_json(cls, data: Any, where: str = MANIFEST) -> Self:
        """Read `to_json`'s form; errors name file and key."""
        fields = JsonFields(data, where)
        version = fields.get("schema_version", int)
        fields = JsonFields(migrate_manifest(fields.data, version, where), where)
        gaps = fields.items("gaps", dict)
        parts = fields.items("parts", dict)
        if len(parts) > MAX_PARTS:
            raise TraceError(f"{where}: {len(parts)} parts; a trace has at most {MAX_PARTS}")
        return cls(
            geometry=Geometry.from_json(fields.get("geometry", dict), f"{where}: geometry"),
            weight_kind=fields.choice("weight_kind", WeightKind),
            confidence_kind=fields.choice("confidence_kind", ConfidenceKind),
            weight_sum=fields.number("weight_sum"),
            model=fields.get("model", dict),
            tokenizer=fields.get("tokenizer", dict),
            decode=fields.get("decode", dict),
            seed=fields.optional("seed", int),
            prompts=fields.items("prompts", dict),
            provenance=fields.get("provenance", dict),
            gaps=tuple(Gap.from_json(g, f"{where}: gaps[{i}]") for i, g in enumerate(gaps)),
            ordered=fields.get("ordered", bool),
            lacks=fields.items("lacks", str),
            parts=tuple(
                Part.from_json(part, f"{where}: parts[{number}]", version)
                for number, part in enumerate(parts)
            ),
            status=fields.choice("status", Status),
        )


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a trace folder."""
    file = folder / MANIFEST
    try:
        if not file.is_file():
            what = "no such folder" if not folder.exists() else f"it has no {MANIFEST}"
            raise TraceError(f"{folder}: not a trace ({what})")
        size = file.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise TraceError(
                f"{file}: {size} bytes; a manifest has at most {MAX_MANIFEST_BYTES} (a trace of at "
                f"most {MAX_PARTS} parts)"
            )
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{file}: can not be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not readable as text ({error.reason}); restore it") from None
    data = parse_json(text, str(file))
    try:
        return Manifest.from_json(data, str(file))
    except TraceError as error:
        if str(error).startswith(str(file)):
            raise
        raise TraceError(f"{file}: {error}") from None


def manifest_text(manifest: Manifest) -> str:
    """Return the text of `trace.json`."""
    return json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n"
