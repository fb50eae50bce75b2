"""A flat file of experts, laid out for direct I/O.

The first block is JSON: the form of an expert, the experts of each layer, how numbers are kept, and
the origin of the weights. From `HEADER_BYTES` on follow the rows of `oled.live.store.HostStore`,
each padded to whole blocks.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oled.atomic import replaced_file
from oled.errors import UserError
from oled.live.direct_io import BLOCK_BYTES, rounded_up
from oled.live.kernels import ExpertForm
from oled.live.store import FLOAT32, Numbers, random_rows
from oled.types import Array, Ints

HEADER_BYTES = BLOCK_BYTES
_MAGIC = "oled experts 1"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFile:
    """Row `first[l] + e` of the file is expert e of MoE layer l."""

    path: Path
    form: ExpertForm
    first: Ints  # [L]
    num_experts: Ints  # [L]
    numbers: Numbers = FLOAT32

    @property
    def expert_bytes(self) -> int:
        return self.form.size * self.numbers.bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of an expert with its padding."""
        return rounded_up(self.expert_bytes)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + int(self.num_experts.sum()) * self.row_bytes

    def offset(self, row: int) -> int:
        """Return the byte at which a row begins."""
        return HEADER_BYTES + row * self.row_bytes

    @classmethod
    def random(
        cls,
        path: Path,
        form: ExpertForm,
        num_experts: Ints,
        seed: int,
        progress: Callable[[range], Any] = iter,
    ) -> ExpertFile:
        """Return the file of the random experts that `HostStore.random` makes, in float32.

        It is written a row at a time, unless `path` already holds these experts. Raises UserError
        where it holds others, is cut short, or where the disk is too small.
        """
        found = cls(path, form, np.cumsum(num_experts) - num_experts, num_experts)
        header = found._header(f"random, seed {seed}")
        if path.exists():
            found._check(header)
        else:
            random, rows = random_rows(form, int(num_experts.sum()), seed), num_experts.sum()
            found._write(header, (random(row) for row in progress(range(int(rows)))))
        return found

    @classmethod
    def written(
        cls, path: Path, form: ExpertForm, num_experts: Ints, rows: Iterable[Array]
    ) -> ExpertFile:
        """Write a model's experts, f32[S] each, and return the file.

        Raises UserError where `path` is there already, or where the disk is too small.
        """
        found = cls(path, form, np.cumsum(num_experts) - num_experts, num_experts)
        if path.exists():
            raise UserError(f"{path} is there already: remove it or name another expert_file")
        found._write(found._header("a model"), rows)
        return found

    def _header(self, origin: str) -> bytes:
        facts = {
            "magic": _MAGIC,
            "form": self.form._asdict(),
            "experts": self.num_experts.tolist(),
            "numbers": self.numbers.name,
            "origin": origin,
        }
        text = json.dumps(facts).encode()
        if len(text) > HEADER_BYTES:
            raise UserError(f"{self.path}: {len(self.num_experts)} layers are too many for a file")
        return text.ljust(HEADER_BYTES)

    def _check(self, header: bytes) -> None:
        with self.path.open("rb") as file:
            found = file.read(HEADER_BYTES)
        if found != header:
            raise UserError(f"{self.path}: the file holds other experts; remove it or name another")
        size = self.path.stat().st_size
        if size != self.file_bytes:
            raise UserError(
                f"{self.path}: {size:,} bytes, {self.file_bytes:,} are expected: the file was cut "
                f"short or is still being written; remove it"
            )

    def _write(self, header: bytes, rows: Iterable[Array]) -> None:
        """Write all rows beside the file, have them on the disk, and give them their name."""
        padding = bytes(self.row_bytes - self.expert_bytes)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if self.file_bytes > free:
                needed = f"{self.file_bytes:,} bytes are needed, {free:,} are free"
                raise OSError(errno.ENOSPC, needed)
            with replaced_file(self.path, sync=True) as beside, beside.open("wb") as file:
                file.write(header)
                for row in rows:
                    file.write(row.data)
                    file.write(padding)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from error
