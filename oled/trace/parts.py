"""A trace folder in the making: closed part files, and a manifest that never promises too much.

All tables of a part hold the same forwards. A part is written under a temporary name, synced,
renamed, and only then listed in `trace.json` (itself replaced in one step), so that whatever is
listed is whole. Creating `trace.json` is also the lock: a second writer finds it and refuses.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from oled.atomic import UNCLOSED, replaced_file, to_disk, whole_folder, write_text
from oled.trace.errors import TraceError
from oled.trace.manifest import MANIFEST, Manifest, Part, Status, manifest_text

KEPT = "; the parts closed before stay readable with allow_partial=true"


class PartFolder:
    """Writes tables row group by row group, and closes them as parts."""

    def __init__(self, path: str | Path, manifest: Manifest) -> None:
        self.path = Path(path)
        self.manifest = replace(manifest, status=Status.PARTIAL, parts=())
        self._number = 0
        self._files: dict[str, pq.ParquetWriter] = {}
        self._failed = False
        self._claim()

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Write a row group of each table, all of the same forwards."""
        self._refuse_after_failure()
        with self._or_abandon():
            for table, data in tables.items():
                if table not in self._files:
                    self._files[table] = _open_file(self._name(table, UNCLOSED), data.schema)
                self._files[table].write_table(data, row_group_size=data.num_rows)

    def close_part(self) -> None:
        """Make what was written safe and list it."""
        if not self._files:
            return
        with self._or_abandon():
            for file in self._files.values():
                file.close()
            parts = [self._close_file(table) for table in self._files]
        self._files = {}
        self._number += 1
        self.manifest = replace(self.manifest, parts=(*self.manifest.parts, *parts))
        self._write_manifest()

    def complete(self) -> None:
        """Close the last part and declare the trace complete."""
        self._refuse_after_failure()
        self.close_part()
        self.manifest = replace(self.manifest, status=Status.COMPLETE)
        self._write_manifest()

    def _claim(self) -> None:
        taken = TraceError(
            f"{self.path}: already holds a trace (or another writer is at work there); choose "
            f"another folder or delete it"
        )
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if any(file.suffix in (".parquet", UNCLOSED) for file in self.path.iterdir()):
                raise taken
            try:
                with (self.path / MANIFEST).open("x", encoding="utf-8") as file:
                    _write_or_remove(file, manifest_text(self.manifest))
            except FileExistsError:
                raise taken from None

    def _refuse_after_failure(self) -> None:
        if self._failed:
            raise TraceError(f"{self.path}: writing failed before; what came since is lost")

    def _close_file(self, table: str) -> Part:
        temporary, final = self._name(table, UNCLOSED), self._name(table)
        with temporary.open("rb") as data:
            checksum = hashlib.file_digest(data, "sha256").hexdigest()
        to_disk(temporary)
        rows = pq.read_metadata(temporary).num_rows
        temporary.rename(final)
        return Part(table, final.name, rows, checksum)

    def _name(self, table: str, suffix: str = "") -> Path:
        return self.path / f"{table}-{self._number:05d}.parquet{suffix}"

    def _write_manifest(self) -> None:
        with writing(self.path, KEPT):
            write_text(self.path / MANIFEST, manifest_text(self.manifest), sync=True)

    @contextlib.contextmanager
    def _or_abandon(self) -> Iterator[None]:
        """Give up the open part where writing fails: its tables may not agree any more."""
        try:
            with writing(self.path, KEPT):
                yield
        except BaseException:
            self._failed = True
            for table, file in self._files.items():
                with contextlib.suppress(OSError, pa.ArrowException):
                    file.close()
                with contextlib.suppress(OSError):
                    self._name(table, UNCLOSED).unlink(missing_ok=True)
            self._files = {}
            raise


@contextlib.contextmanager
def writing(path: Path, note: str = "") -> Iterator[None]:
    """Turn what the system says against writing into one line, as no room or no permission."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
        raise TraceError(f"{path}: can not be written ({reason}){note}") from error


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write a new file to; the file appears only when it is whole."""
    final = Path(path)
    if final.exists():
        raise TraceError(f"{final}: exists already; choose another name or delete it")
    with writing(final), replaced_file(final, sync=True) as temporary:
        yield temporary


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder to fill; it appears under its name only when it is whole."""
    temporary = Path()
    with writing(Path(path)):
        try:
            with whole_folder(path) as temporary:
                yield temporary
        except FileExistsError:
            text = f"{path}: already holds something; choose another folder or delete it"
            raise TraceError(text) from None
        except TraceError as error:
            raise TraceError(str(error).replace(str(temporary), str(path))) from error


def _write_or_remove(file: TextIO, text: str) -> None:
    """Write the file's whole text, or remove it: an empty file would lock the folder for ever."""
    try:
        file.write(text)
        file.flush()
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise


def _open_file(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    split: list[str] = []  # floats by byte planes
    plain: list[str] = []  # everything else by dictionary
    for field in schema:
        nested = pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        leaf = f"{field.name}.list.element" if nested else field.name
        value = field.type.value_type if nested else field.type
        (split if pa.types.is_floating(value) else plain).append(leaf)
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=plain,
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
    )
