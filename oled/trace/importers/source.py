"""What a reader of another format is, and what it hands over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oled.trace.errors import TraceError
from oled.trace.manifest import Manifest
from oled.trace.options import Options
from oled.trace.schema import ForwardRecord

LACKS = {
    "weights": "gate weights; stored as zeros",
    "confidence": "how sure the model was of a token",
    "order": "which forward came first; nothing that depends on it can be replayed",
    "requests": "which request a token belongs to; all are request 0",
    "passes": "which requests shared a model pass; they stand one after the other",
    "phases": "whether a forward was prefill or decoding; all count as decoding",
    "prefill": "the prompts' forwards; a request begins with its first generated token",
    "tokens": "which experts one token had together; only each expert's number of tokens is true",
    "token_ids": "the tokens themselves",
    "positions": "places in the text; tokens are counted from 0",
    "layers": "absolute ids of layers; MoE layers are counted from 0",
    "expert_bytes": "the size of an expert; the authors' assumption stands",
    "decoding": "a text was run through the model instead of being generated",
    "applied_routing": "what the model used: top-k was taken anew from its scores",
}
"""Words of `Manifest.lacks`, and what each means."""


@dataclass(frozen=True, slots=True)
class Source:
    """A manifest and the forwards, which may be read once."""

    manifest: Manifest
    records: Iterable[ForwardRecord]


@dataclass(frozen=True, slots=True)
class Format:
    """A format that can be read."""

    name: str
    summary: str
    read: Callable[[Path, Options], Source]
    lacks: tuple[str, ...]  # words of LACKS
    options: Mapping[str, str] = field(default_factory=dict)  # name: what it is
    suffixes: tuple[str, ...] = ()  # of the files in a folder; none: a file only


def provenance(name: str, path: Path) -> dict[str, Any]:
    """Say which file (or folder of files) a trace was imported from."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.is_file():
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
    shown = path.resolve().name.encode("utf-8", "replace").decode()
    return {"kind": "import", "format": name, "file": shown, "sha256": digest.hexdigest()}


def source_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file itself, or those of a folder by name."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in suffixes and file.is_file())
    if not files:
        raise TraceError(f"{path}: holds no file that ends in {', '.join(suffixes)}")
    return files
