"""Pickles that would run and archives that unfold: refused, and nothing is executed."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sources import FACTS

from oled.trace import TraceError
from oled.trace.importers import read_source


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "executed"))


@pytest.mark.parametrize("inside", [True, False])
def test_pickles_are_refused_and_not_executed(tmp_path: Path, inside: bool) -> None:
    target = tmp_path / "executed"
    evil = Evil(target)
    value = {"records": [{"topk_ids_of_layer": evil}]} if inside else evil
    torch.save(value, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(value))
    torch.save(value, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    array = np.empty(1, dtype=object)
    array[0] = evil
    np.save(tmp_path / "d.npy", array, allow_pickle=True)
    np.savez(tmp_path / "e.npz", a=array)
    for name, format_name in (
        ("a.pt", "sglang_dump"),
        ("b.pt", "sglang_dump"),
        ("c.pt", "router_logits"),
        ("d.npy", "sglang_routed_experts"),
        ("e.npz", "vllm_routed_experts"),
        ("e.npz", "cacheable_by_design"),
    ):
        options = {} if format_name == "cacheable_by_design" else FACTS
        with pytest.raises(TraceError, match=f"{name}: not readable as") as refusal:
            read_source(format_name, tmp_path / name, options)
        assert "\n" not in str(refusal.value)
    assert not target.exists()


def test_tensors_and_archives_that_unfold(tmp_path: Path) -> None:
    torch.save([torch.zeros(1).expand(10**6, 10**6)], tmp_path / "a.pt")
    with pytest.raises(TraceError, match="its values are larger than the file can hold"):
        read_source("router_logits", tmp_path / "a.pt", FACTS | {"top_k": 2})
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**7)
    with pytest.raises(TraceError, match="its members are compressed"):
        read_source("router_logits", tmp_path / "b.pt", FACTS | {"top_k": 2})
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999, 9, 9)}"
        data = b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header
        archive.writestr("a.npy", data)
    with pytest.raises(TraceError, match=r"c.npz: not readable as NPZ"):
        read_source("vllm_routed_experts", tmp_path / "c.npz", FACTS)
