"""Writing and reading: round trips, crash safety, refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import (
    assert_holds,
    diffusion,
    edit_manifest,
    edit_table,
    geometry,
    manifest,
    record,
    routes,
    write,
)

from oled.trace import (
    ConfidenceKind,
    ForwardRecord,
    Gap,
    Kept,
    Manifest,
    Phase,
    Prediction,
    RouterScores,
    Status,
    TraceError,
    TraceWriter,
    WeightKind,
    load,
    read_manifest,
    select_requests,
    trace_of_records,
)
from tests.support.seeds import sized

SHAPE = geometry()


@st.composite
def traces(draw: st.DrawFn) -> tuple[Manifest, list[ForwardRecord], int]:
    """A geometry, some records that fit it, and a part size."""
    experts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    shape = geometry(experts, top_k=draw(st.integers(1, min(4, min(experts)))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    records = []
    for number in range(draw(st.integers(1, 6))):
        tokens = draw(st.integers(1, 5))
        ids, weights = routes(rng, shape, tokens)
        ids[rng.random(ids.shape) < 0.1] = -1
        rows = None
        if draw(st.booleans()):
            rows = tuple(np.flatnonzero(rng.random(tokens) < 0.7) for _ in experts)
        records.append(
            record(
                ids.astype(draw(st.sampled_from([np.int16, np.int32, np.int64]))),
                weights.astype(draw(st.sampled_from([np.float16, np.float32, np.float64]))),
                request=draw(st.integers(0, 3)),
                pass_id=number,
                phase=draw(st.sampled_from(Phase)),
                block=draw(st.integers(-1, 9)),
                step=draw(st.integers(-1, 9)),
                context=draw(st.integers(0, 2**31 - 1)),
                accepted=rng.integers(0, 2, tokens),
                produced=draw(st.integers(0, 2**16 - 1)),
                measured_ns=draw(st.integers(-1, 2**62)),
                token_ids=rng.integers(-1, 2**31, tokens),
                positions=rng.integers(0, 2**32, tokens),
                confidence=np.where(rng.random(tokens) < 0.3, np.nan, rng.random(tokens)),
                state=rng.integers(0, 4, tokens),
                row_tokens=rows,
            )
        )
    return manifest(shape), records, draw(st.integers(1, 40))


@settings(max_examples=sized(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=traces())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, case) -> None:
    about, records, rows_per_part = case
    folder = tmp_path_factory.mktemp("trip") / "trace"
    with TraceWriter(folder, about, rows_per_part=rows_per_part) as writer:
        for one in records:
            writer.append(one)
        writer._captured = True  # ids may happen to be all zero here
    if any(one.row_mask().any() for one in records):
        trace = load(folder, verify=True)
        assert trace.manifest.geometry == about.geometry
        assert_holds(trace, records)
        assert_holds(trace_of_records(about, records), records)


def test_arrays_are_contiguous_and_writable(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE), rows_per_part=50))
    for table in (trace.forwards, trace.tokens, trace.routing):
        for name in table.__slots__:
            column = getattr(table, name)
            assert column.flags.c_contiguous, name
            assert column.flags.writeable, name


def test_dtypes_are_those_of_the_schema(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE)))
    assert trace.routing.forward.dtype == np.uint32
    assert trace.routing.layer.dtype == trace.routing.token.dtype == np.uint16
    assert trace.routing.expert_ids.dtype == np.uint16
    assert trace.routing.weights.dtype == np.float32
    assert trace.forwards.block.dtype == np.int32
    assert trace.tokens.confidence.dtype == np.float32


def test_side_tables_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ids, weights = routes(rng, SHAPE, 3)
    said = (
        Prediction("gate", 1, 2, np.array([3, 4]), np.array([0.5, 0.25])),
        Prediction("gate", 1, 3, np.array([7]), np.array([1.0])),
    )
    records = [
        record(ids, weights, scores=RouterScores(ids, weights, weights + 1), predictions=said),
        record(ids, weights, pass_id=1, scores=RouterScores(ids, weights, weights + 2)),
    ]
    trace = load(write(tmp_path / "t", manifest(SHAPE), records))
    assert trace.predictions is not None
    assert trace.scores is not None
    assert trace.predictions.names == ("gate",)
    np.testing.assert_array_equal(trace.predictions.offsets, [0, 2, 3])
    np.testing.assert_array_equal(trace.predictions.expert_ids, [3, 4, 7])
    np.testing.assert_array_equal(trace.predictions.target, [2, 3])
    flat = weights.reshape(-1, 2).astype(np.float32)
    np.testing.assert_array_equal(trace.scores.values, np.concatenate([flat, flat]))
    assert trace.scores.biased is not None
    np.testing.assert_allclose(trace.scores.biased[-1], weights[-1, -1] + 2, rtol=1e-6)


def test_manifest_round_trips(tmp_path: Path) -> None:
    about = manifest(
        geometry(zero_experts=2, hidden_size=64, name="toy"),
        weight_kind=WeightKind.SCALED_SUM,
        weight_sum=2.5,
        confidence_kind=ConfidenceKind.CHOSEN_PROBABILITY,
        model={"id": "toy", "revision": None},
        decode={"mode": "free", "block_length": 4},
        seed=7,
        prompts=({"hash": "ab", "source": "x"},),
        gaps=(Gap(3, Phase.PREFILL, Kept.LAST_TOKEN, "pruned"),),
        ordered=False,
        lacks=("order",),
    )
    found = read_manifest(_empty(tmp_path / "t", about))
    assert found == replace(about, status=Status.PARTIAL)


def _empty(folder: Path, about: Manifest) -> Path:
    TraceWriter(folder, about)
    return folder


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, manifest(SHAPE), diffusion(SHAPE), rows_per_part=60)
    first = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    second = {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert first == second


def test_hash_depends_on_content_and_geometry(tmp_path: Path) -> None:
    base = load(write(tmp_path / "a", manifest(SHAPE), diffusion(SHAPE)))
    other = load(write(tmp_path / "b", manifest(SHAPE), diffusion(SHAPE, seed=1)))
    wider = load(write(tmp_path / "c", manifest(geometry(9)), diffusion(SHAPE)))
    assert len({base.hash, other.hash, wider.hash}) == 3


# --- refusals -------------------------------------------------------------------------------------


def test_writer_refuses_a_second_writer_and_an_old_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", manifest(SHAPE)) as writer:
        with pytest.raises(TraceError, match="already holds a trace"):
            TraceWriter(tmp_path / "t", manifest(SHAPE))
        writer.append(diffusion(SHAPE)[0])
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path / "t", manifest(SHAPE))


@pytest.mark.parametrize("ids", [None, [[[0, 0]], [[0, 0]], [[0, 0]]]])
def test_empty_or_all_zero_capture_is_never_complete(tmp_path: Path, ids) -> None:
    writer = TraceWriter(tmp_path / "t", manifest(SHAPE))
    if ids is not None:
        writer.append(record(ids, np.zeros((3, 1, 2))))
    with pytest.raises(TraceError, match="stays partial"):
        writer.close()
    assert read_manifest(tmp_path / "t").status is Status.PARTIAL
    if ids is None:
        with pytest.raises(TraceError, match="holds no closed part"):
            load(tmp_path / "t")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": np.array([1, 2, 9])}, "layer 9 is no MoE layer"),
        ({"expert_ids": np.full((3, 2, 2), 8)}, "layer 1, token 0: expert id 8 where the layer"),
        ({"expert_ids": np.full((3, 2, 2), -2)}, "-2 is neither -1"),
        ({"expert_ids": np.full((3, 2, 2), 70000)}, "70000 is neither -1"),
        ({"expert_ids": np.ones((3, 2, 3), int), "weights": np.ones((3, 2, 3))}, "3 experts per"),
    ],
)
def test_writer_refuses_a_record_that_does_not_fit(tmp_path: Path, changes, message) -> None:
    writer = TraceWriter(tmp_path / "t", manifest(SHAPE))
    with pytest.raises(TraceError, match=message):
        writer.append(record(np.ones((3, 2, 2), int), **{"weights": None, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.ones((3, 2, 3))}, "weights .* differ from expert_ids"),
        ({"confidence": np.ones(3)}, r"confidence \(3,\) must be \(2,\)"),
        ({"row_tokens": (np.arange(2),)}, "row_tokens has 1 entries for 3 layers"),
    ],
)
def test_record_refuses_shapes_that_do_not_agree(changes, message) -> None:
    with pytest.raises(TraceError, match=message):
        record(np.ones((3, 2, 2), int), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": ()}, "'moe_layers' is empty"),
        ({"moe_layers": (2, 1, 3)}, "must ascend"),
        ({"num_layers": 3}, "do not fit 'num_layers' 3"),
        ({"top_k": 9}, "'top_k' 9 does not fit"),
        ({"expert_bytes": (1, 2)}, "'expert_bytes' has 2 entries for 3"),
        ({"experts_per_layer": (8, 0, 8)}, "'experts_per_layer' holds 0"),
        ({"experts_per_layer": (8, 8, 65536)}, "more than 65535 experts"),
    ],
)
def test_geometry_refuses_nonsense(changes, message) -> None:
    with pytest.raises(TraceError, match=message):
        replace(SHAPE, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("geometry"), "'geometry' is missing"),
        (lambda data: data["geometry"].update(top_k="two"), "'top_k' must be int, found 'two'"),
        (lambda data: data.update(weight_kind="odd"), "'weight_kind' is 'odd'; known: sum_one"),
        (lambda data: data.update(weight_sum=2.5), "belongs to 'scaled_sum' alone"),
        (lambda data: data.update(schema_version=99), "schema version 99, this oled reads 0 to 1"),
        (lambda data: data["parts"][0].update(rows=True), r"parts\[0\]: 'rows' must be int"),
    ],
)
def test_bad_manifests_are_named(tmp_path: Path, change, message) -> None:
    folder = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))
    edit_manifest(folder, change)
    with pytest.raises(TraceError, match=message):
        load(folder)


def test_load_names_what_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a trace \\(no such folder"):
        load(tmp_path / "nowhere")
    folder = write(tmp_path / "t", manifest(SHAPE), diffusion(SHAPE))
    edit_table(folder, "routing-00000.parquet", lambda c: c["token"].reverse(), checksum=False)
    with pytest.raises(TraceError, match=r"routing-00000.parquet: its checksum is not"):
        load(folder, verify=True)
    (folder / "tokens-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(TraceError, match=r"tokens-00000.parquet: not readable as Parquet"):
        load(folder)
    (folder / "tokens-00000.parquet").unlink()
    with pytest.raises(TraceError, match=r"tokens-00000.parquet: listed in the manifest but"):
        load(folder)
    (folder / "trace.json").write_text("{")
    with pytest.raises(TraceError, match=r"trace.json: not readable as JSON"):
        load(folder)


# --- crash safety ---------------------------------------------------------------------------------


def test_an_exception_keeps_what_was_appended_as_partial(tmp_path: Path) -> None:
    records = diffusion(SHAPE)

    def fail() -> None:
        with TraceWriter(tmp_path / "t", manifest(SHAPE)) as writer:
            for one in records[:5]:
                writer.append(one)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(TraceError, match="the trace is partial"):
        load(tmp_path / "t")
    assert_holds(load(tmp_path / "t", allow_partial=True), records[:5])


# --- cutting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_selected_requests_are_what_was_recorded_of_them(interleaved: bool) -> None:
    records = diffusion(SHAPE, requests=4, interleaved=interleaved)
    said = (Prediction("gate", 1, 2, np.array([3, 4]), np.array([0.5, 0.25])),)
    records = [
        replace(
            one,
            predictions=said * (number % 2),
            scores=RouterScores(one.expert_ids, one.weights),
        )
        for number, one in enumerate(records)
    ]
    trace = trace_of_records(manifest(SHAPE), records)
    cut = select_requests(trace, [1, 3])
    kept = [one for one in records if one.request in (1, 3)]
    assert_holds(cut, kept)
    alone = trace_of_records(manifest(SHAPE), kept)
    assert cut.predictions is not None
    assert alone.predictions is not None
    for name in ("forward", "layer", "target", "predictor", "offsets", "expert_ids", "scores"):
        np.testing.assert_array_equal(
            getattr(cut.predictions, name), getattr(alone.predictions, name)
        )
    assert cut.scores is not None
    np.testing.assert_array_equal(cut.scores.forward, cut.routing.forward)
    assert cut.hash != trace.hash
    with pytest.raises(TraceError, match="no request 9"):
        select_requests(trace, [9])


def test_import_is_quick_and_without_numba() -> None:
    code = (
        "import time, sys; a = time.process_time(); import oled.trace; "
        "print(time.process_time() - a, 'numba' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, numba, torch = done.stdout.split()
    assert (numba, torch) == ("False", "False")
    assert float(seconds) < 1.0  # 0.25 s on a quiet machine
