"""Input that is damaged, wrong or meant ill: one clear line, bounded time and memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import refused, rewrite
from fuzz import run_case
from small import diffusion, edit_manifest, geometry, manifest, write
from sources import FACTS, routed, vllm_response, write_json

from oled.trace import TraceError, load, read_manifest
from oled.trace.check import check
from oled.trace.exporters import export_trace
from oled.trace.importers import import_trace, read_source
from tests.support.seeds import seeds

SHAPE = geometry()
ROUTING, FORWARDS, TOKENS = (f"{t}-00000.parquet" for t in ("routing", "forwards", "tokens"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))


# --- damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(6))
def test_random_damage(tmp_path: Path, part: int) -> None:
    """A few cases of the fuzzer, others with every commit."""
    for number in seeds(150)[part::6]:
        place = tmp_path / str(number)
        place.mkdir()
        run_case(number, place)


@pytest.mark.parametrize("number", [1014429, 1025079, 1026000, 3024966, 7002950])
def test_cases_that_were_found(tmp_path: Path, number: int) -> None:
    """Warnings about infinite weights, an old dtype, a storage, a sum; half a letter in a name."""
    run_case(number, tmp_path)


def test_what_the_fuzzer_found(tmp_path: Path) -> None:
    """An archive that begins as an array; numbers beyond 64 bits, and fractions, as expert ids."""
    np.savez(tmp_path / "a.npz", a=np.zeros(3))
    np.save(tmp_path / "b.npy", np.arange(3))
    joined = (tmp_path / "b.npy").read_bytes() + (tmp_path / "a.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(joined)
    with pytest.raises(TraceError, match=r"c.npz: not readable as NPZ .it begins as another kind"):
        read_source("vllm_routed_experts", tmp_path / "c.npz", FACTS)
    for value in (10**30, 0.5, None):
        response = vllm_response([[[1, 2]]], [[[3, value]]])
        with pytest.raises(TraceError, match="ids of type"):
            read_source("vllm_routed_experts", write_json(tmp_path / "d.json", response), FACTS)


@pytest.mark.filterwarnings("error")
def test_infinite_weights_make_no_noise(folder: Path) -> None:
    kind = pa.list_(pa.float32(), 2)
    infinite = put("weights", lambda n: pa.array([[np.inf, -np.inf]] * n, kind))
    rewrite(folder, ROUTING, infinite)
    assert set(check(folder).breaches) == {"weight_finite"}


@pytest.mark.filterwarnings("error")
def test_old_types_make_no_noise(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2), dtype="S4"))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole.replace(b"'|S4'", b"'|a4'"))
    with pytest.raises(TraceError, match="must be integers"):
        read_source("vllm_routed_experts", tmp_path / "a.npy", FACTS)


def test_a_file_cut_anywhere(folder: Path) -> None:
    whole = (folder / ROUTING).read_bytes()
    for length in range(0, len(whole), max(len(whole) // 25, 1)):
        (folder / ROUTING).write_bytes(whole[:length])
        refused(folder, f"{ROUTING}: ")


FEWER = "token rows, but the forwards add up to"

# --- wrong columns --------------------------------------------------------------------------------


def cast(column: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, table.column(column).cast(kind))

    return change


def put(column: str, array: Callable[[int], pa.Array]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        field = table.schema.field(column).with_nullable(True)
        return table.set_column(place, field, array(table.num_rows).cast(field.type))

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (ROUTING, cast("forward", pa.int64()), "column 'forward' is int64, not uint32"),
        (TOKENS, cast("confidence", pa.float64()), "column 'confidence' is double, not float"),
        (TOKENS, cast("token_id", pa.string()), "column 'token_id' is string, not int32"),
        (ROUTING, cast("weights", pa.list_(pa.float32())), "column 'weights' is list"),
        (ROUTING, lambda t: t.drop_columns(["token"]), "column 'token' is missing"),
        (ROUTING, put("layer", lambda n: pa.array([None] * n, pa.uint16())), "values are missing"),
        (
            ROUTING,
            put("weights", lambda n: pa.array([None] * n, pa.list_(pa.float32(), 2))),
            "values are missing",
        ),
        (ROUTING, lambda t: t.slice(0, 0), "table 'routing' has no rows"),
        (FORWARDS, lambda t: t.slice(0, 0), "table 'forwards' has no rows"),
        (FORWARDS, lambda t: t.slice(1), FEWER),
    ],
)
def test_wrong_columns(folder: Path, file: str, change, message: str) -> None:
    rewrite(folder, file, change)
    rules = {"table 'routing' has no rows": "rows_per_layer", FEWER: "numbering"}
    refused(folder, message, rules.get(message, "file"))


def test_columns_nobody_asked_for_are_not_read(folder: Path) -> None:
    before = load(folder)
    rewrite(folder, ROUTING, lambda t: t.append_column("note", pa.array(["x"] * t.num_rows)))
    np.testing.assert_array_equal(load(folder).routing.expert_ids, before.routing.expert_ids)
    assert check(folder).ok


@pytest.mark.parametrize(
    ("file", "column", "value", "message"),
    [
        (FORWARDS, "phase", 9, "a phase is unknown .row 0"),
        (FORWARDS, "context", -5, "a context length is negative"),
        (TOKENS, "state", 200, "a token's state is unknown"),
        (FORWARDS, "forward", 7, "forwards are not numbered"),
    ],
)
def test_values_that_array_code_would_not_notice(folder, file, column, value, message) -> None:
    rewrite(folder, file, put(column, lambda n: pa.array([value] * n)))
    with pytest.raises(TraceError, match=message):
        load(folder)
    assert not check(folder).ok


# --- a manifest that lies -------------------------------------------------------------------------


def change_part(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["parts"][0].update(changes)


def change_shape(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["geometry"].update(changes)


@pytest.mark.parametrize(
    ("change", "message", "rule"),
    [
        (change_part(rows=10**18), "rows, the manifest says 1000000000000000000", "file"),
        (change_part(rows=-1), "has -1 rows", "manifest"),
        (change_part(rows=10**40), "the manifest says 1", "file"),
        (change_part(table="rows"), "no closed part of", "file"),
        (change_part(file="gone-00000.parquet"), "gone-00000.parquet: listed .* missing", "file"),
        (lambda data: data["parts"].append(data["parts"][0]), "a part is listed twice", "manifest"),
        (lambda data: data.update(parts=[]), "no closed part of 'routing'", "file"),
        (lambda data: data.update(parts={}), "'parts' must be list", "manifest"),
        (lambda data: data.update(parts=[7]), "'parts' must hold dict", "manifest"),
        (change_shape(num_layers=10**12), "'num_layers' 1000000000000 is above", "manifest"),
        (change_shape(expert_bytes=[10**30] * 3), "bytes is too large", "manifest"),
        (change_shape(experts_per_layer=[10**9] * 3), "more than 65535 experts", "manifest"),
        (change_shape(hidden_size=10**20), "'hidden_size' is 1", "manifest"),
        (change_shape(top_k=10**20), "'top_k' 1.* does not fit", "manifest"),
        (change_shape(top_k=3), "'expert_ids' is fixed_size_list", "file"),
        (change_shape(zero_experts=-5), "'zero_experts' is -5|does not fit", "manifest"),
        (lambda d: d.update(weight_kind="scaled_sum", weight_sum=-1), "_sum' is -1", "manifest"),
        (lambda data: data.update(seed="x" * 10**6), "'seed' must be int, found 'xxx", "manifest"),
    ],
)  # fmt: skip
def test_lies(folder: Path, change, message: str, rule: str) -> None:
    edit_manifest(folder, change)
    refused(folder, message, rule)
    with pytest.raises(TraceError) as refusal:
        load(folder)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not readable as JSON"),
        (b"[]", "expected a JSON object"),
        (b"[" * 200_000, "not readable as JSON"),
        (b"\xff\xfe", "not readable as text"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "not readable as JSON"),
        (b'{"schema_version": -1}', "schema version -1"),
        (b'{"schema_version": 1, "model": {"id": "\\ud800"}}', "not readable as JSON"),
    ],
)
def test_manifests_that_are_none(folder: Path, text: bytes, message: str) -> None:
    (folder / "trace.json").write_bytes(text)
    refused(folder, message, "manifest")


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../secret.parquet", "/etc/passwd", "a/b.parquet", "..", "", "x\0.parquet", "x\n.parquet"],
)
def test_parts_outside_the_folder(folder: Path, name: str) -> None:
    edit_manifest(folder, change_part(file=name))
    refused(folder, "is not a plain name", "manifest")


def test_links_that_lead_out(folder: Path, tmp_path: Path) -> None:
    (folder / ROUTING).rename(tmp_path / "elsewhere.parquet")
    (folder / ROUTING).symlink_to(tmp_path / "elsewhere.parquet")
    refused(folder, "a link that leads out of the trace")
    (tmp_path / "elsewhere.parquet").rename(folder / "here.parquet")
    (folder / ROUTING).unlink()
    (folder / ROUTING).symlink_to("here.parquet")
    assert load(folder).num_forwards
    (folder / ROUTING).unlink()
    (folder / ROUTING).symlink_to(ROUTING)  # to itself
    refused(folder, "can not be read")


def test_what_is_no_file(folder: Path) -> None:
    (folder / ROUTING).unlink()
    os.mkfifo(folder / ROUTING)  # opening it would wait for ever
    refused(folder, "not a regular file")
    (folder / ROUTING).unlink()
    (folder / ROUTING).mkdir()
    refused(folder, "not a regular file")


def test_names_of_all_kinds(tmp_path: Path) -> None:
    place = tmp_path / "трасса ü  with spaces & 'quotes' 🎉 100%"
    folder = write(place / "t=1,x", manifest(SHAPE), diffusion(SHAPE))
    assert check(folder).ok
    export_trace("csv", folder, place / "a, b.csv")
    np.save(place / "é.npy", routed(np.random.default_rng(0), 3))
    import_trace("vllm_routed_experts", place / "é.npy", place / "ö", FACTS)
    assert read_manifest(place / "ö").provenance["file"] == "é.npy"


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"bad\xff.npy")
    np.save(source, routed(np.random.default_rng(0), 3))
    import_trace("vllm_routed_experts", source, tmp_path / "t", FACTS)
    assert read_manifest(tmp_path / "t").provenance["file"] == "bad?.npy"
