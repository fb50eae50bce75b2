"""Files of torch.save, read with `weights_only`: tensors and plain values, nothing executed.

The one place in `oled.trace` that needs torch; it is imported when such a file is read.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

from oled.trace.errors import TraceError
from oled.trace.importers.arrays import DAMAGE, damage, quiet

DAMAGED_PICKLE = (*DAMAGE, pickle.UnpicklingError, AttributeError, IndexError, TypeError)
EXPANSION = 4
"""Bytes that the values may take for each byte of the file: views and references repeat them."""


def read_tensors(path: Path) -> Any:
    """Return the saved value: dicts, lists, strings and numbers, with arrays instead of tensors."""
    import torch

    with damage(path, "a file of torch.save"):
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its members are compressed, which torch.save does not do")
        if sum(member.file_size for member in members) > size:
            raise ValueError("its members are larger than the file")
    try:
        with quiet():
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return _Plain(EXPANSION * size).of(value)
    except TraceError:
        raise
    except DAMAGED_PICKLE as error:
        reason = str(error).partition("\n")[0][:120] or type(error).__name__
        raise TraceError(
            f"{path}: not readable as tensors and plain values ({reason}); nothing in it was "
            f"executed"
        ) from None


class _Plain:
    """Turns tensors into arrays and counts what that amounts to."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def of(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            self._spend(value.numel() * value.element_size())
            if value.is_sparse or value.is_quantized or value.layout is not torch.strided:
                raise ValueError("a sparse or quantised tensor")
            wide = value.float() if value.dtype is torch.bfloat16 else value
            return wide.detach().numpy()
        self._spend(1)
        match value:
            case dict():
                return {key: self.of(item) for key, item in value.items()}
            case list() | tuple():
                return [self.of(item) for item in value]
            case None | str() | int() | float():
                return value
        raise ValueError(f"a {type(value).__name__}")

    def _spend(self, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise ValueError("its values are larger than the file can hold")
