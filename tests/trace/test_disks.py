"""Full and read-only disks, and several writers in one folder: one clear line, nothing half."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small import diffusion, geometry, manifest, write
from sources import FACTS, routed

from oled.trace import TraceError, TraceWriter, load
from oled.trace.check import check
from oled.trace.exporters import export_trace
from oled.trace.importers import import_trace

SHAPE = geometry()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))


FULL = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from small import diffusion, geometry, manifest
from oled.errors import UserError
from oled.trace import TraceWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
shape = geometry()
writer = TraceWriter({folder!r}, manifest(shape), rows_per_part=300, rows_per_group=100)
try:
    with writer:
        for number, one in enumerate(diffusion(shape, requests=200)):
            if number == 200:  # from here on no file may grow beyond its first 2 KiB
                resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
            writer.append(one)
except UserError as error:
    print(error)
    sys.exit(1)
"""


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    code = FULL.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "t"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("\n") == 1
    assert "can not be written (" in done.stdout
    assert "the parts closed before stay readable" in done.stdout
    assert done.stderr == ""
    with pytest.raises(TraceError, match="the trace is partial"):
        load(tmp_path / "t")
    trace = load(tmp_path / "t", allow_partial=True, verify=True)
    assert 0 < trace.num_forwards <= 200
    assert set(check(tmp_path / "t").breaches) == {"complete"}
    assert not list((tmp_path / "t").glob("*.unclosed"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_writes_that_fail(tmp_path: Path, folder: Path, monkeypatch, code: int) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError(code, os.strerror(code))

    writer = TraceWriter(tmp_path / "w", manifest(SHAPE))
    for one in diffusion(SHAPE):
        writer.append(one)
    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetWriter, "write_table", fail)
        patched.setattr(pq.ParquetWriter, "write_batch", fail)
        with pytest.raises(TraceError, match=rf"w: can not be written .{os.strerror(code)}."):
            writer.close()
        with pytest.raises(TraceError, match="can not be written"):
            export_trace("parquet", folder, tmp_path / "x.parquet")
    with pytest.raises(TraceError, match="writing failed before; what came since is lost"):
        writer.close()
    assert {file.name for file in tmp_path.iterdir()} == {"t", "w"}
    assert [file.name for file in (tmp_path / "w").iterdir()] == ["trace.json"]


def test_folders_that_can_not_be_made(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").touch()
    np.save(tmp_path / "a.npy", routed(np.random.default_rng(0), 3))
    with pytest.raises(TraceError, match=r"can not be written .Not a directory"):
        TraceWriter(tmp_path / "file" / "t", manifest(SHAPE))
    with pytest.raises(TraceError, match=r"can not be written .Not a directory"):
        import_trace("vllm_routed_experts", tmp_path / "a.npy", tmp_path / "file" / "t", FACTS)
    with pytest.raises(TraceError, match=r"can not be written .File exists"):
        TraceWriter(tmp_path / "file", manifest(SHAPE))
    with pytest.raises(TraceError, match=r"can not be written .No such file"):
        export_trace("csv", folder, tmp_path / "nowhere" / "x.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_read_only_folders(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(mode=0o555)
    with pytest.raises(TraceError, match=r"can not be written .Permission denied"):
        TraceWriter(tmp_path / "r" / "t", manifest(SHAPE))


def test_two_writers_in_one_folder(tmp_path: Path) -> None:
    """Of many that start at once one gets the folder; the others are told."""
    found: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        try:
            write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))
            found.append("written")
        except TraceError as error:
            found.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count("written") == 1
    assert sum("already holds a trace (or another writer" in one for one in found) == 7
    assert check(tmp_path / "t").ok


def test_an_import_into_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", routed(np.random.default_rng(0), 3))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert import_trace("vllm_routed_experts", "../a.npy", ".", FACTS) == Path()
    assert check(tmp_path / "here").ok
    with pytest.raises(TraceError, match=r"^/: already holds something"):
        import_trace("vllm_routed_experts", tmp_path / "a.npy", "/", FACTS)


def test_two_imports_into_one_folder(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", routed(np.random.default_rng(0), 3))
    import_trace("vllm_routed_experts", tmp_path / "a.npy", tmp_path / "t", FACTS)
    with pytest.raises(TraceError, match="t: already holds something"):
        import_trace("vllm_routed_experts", tmp_path / "a.npy", tmp_path / "t", FACTS)
    assert check(tmp_path / "t").ok
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npy", "t"]
