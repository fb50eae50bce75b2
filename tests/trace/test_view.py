"""Tables for pandas, Arrow and DuckDB; what is documented of them is true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from small import diffusion, geometry, manifest, write

from oled.trace import NO_EXPERT, Prediction, RouterScores, TraceError, load
from oled.trace.importers import IMPORTERS, LACKS
from oled.trace.tables import TABLES as STORED
from oled.trace.tables import arrow_schema
from oled.trace.view import LONG, TABLES, dataset, describe, head, present, reader, view

SHAPE = geometry()
DOCS = Path(__file__).parents[2] / "docs" / "traces.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    said = (Prediction("gate", 1, 2, np.array([3, 4]), np.array([0.5, 0.25])),)
    records = [
        replace(
            one,
            predictions=said,
            scores=RouterScores(one.expert_ids, one.weights, one.weights),
        )
        for one in diffusion(SHAPE)
    ]
    return write(tmp_path / "t", manifest(SHAPE), records, rows_per_part=60)


def test_every_table_is_described_and_documented() -> None:
    assert list(TABLES) == [LONG, *("forwards", "tokens", "routing", "predictions", "scores")]
    text = DOCS.read_text(encoding="utf-8")
    for table in STORED:
        schema = arrow_schema(table, 2, width=2, biased=True)
        assert set(TABLES[table].columns) == set(schema.names), table
    for table, about in TABLES.items():
        assert about.query in re.sub(r"\s+", " ", text), table
        assert f"```pandas\n{about.frame}\n```" in text, table
        for column in about.columns:
            assert f"`{column}`" in text, (table, column)


def test_every_source_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name, found in IMPORTERS.items():
        assert f"`{name}`" in text
        assert set(found.lacks) <= set(LACKS), name
        for option in found.options:
            assert f"`{option}`" in text, (name, option)
    for word, meaning in LACKS.items():
        assert f"| `{word}` | {meaning} |" in text


def test_the_guide_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in turn, as in a notebook, in a folder with a trace called trace."""
    pytest.importorskip("duckdb", reason="DuckDB is not installed")
    folder.rename(folder.with_name("trace"))
    monkeypatch.chdir(folder.parent)
    cells = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for cell in cells:
        exec(cell, names)
    assert len(cells) == 6
    assert len(names["long"]) == 2 * names["layer"].num_rows * 3  # slots, MoE layers
    assert 0 < names["result"].metrics["hit_rate"] < 1


def test_views_are_the_tables(folder: Path) -> None:
    trace = load(folder)
    long = view(folder)
    assert (trace.routing.expert_ids != NO_EXPERT).sum() == len(long)
    assert all(isinstance(kind, pd.ArrowDtype) for kind in long.dtypes)
    assert long.block.isna().any()
    routing = view(folder, "routing")
    assert list(routing.expert_ids.iloc[0]) == trace.routing.expert_ids[0].tolist()
    assert len(view(folder, "forwards")) == trace.num_forwards
    assert view(folder, "predictions").predictor.unique().tolist() == ["gate"]
    assert len(view(folder, "scores")) == len(trace.routing.forward)


def test_the_pandas_example(folder: Path) -> None:
    """The group-by of the guide, against a plain count."""
    long = view(folder)
    counts = long.groupby(["layer", "expert"]).size()
    trace = load(folder)
    for (layer, expert), count in counts.items():
        here = trace.routing.expert_ids[trace.routing.layer == layer]
        assert (here == expert).sum() == count


def test_datasets_filter(folder: Path) -> None:
    found = dataset(folder).to_table(filter=ds.field("layer") == 2)
    assert found.num_rows == (load(folder).routing.layer == 2).sum()
    with pytest.raises(TraceError, match="the long view is no file"):
        dataset(folder, LONG)


def test_head_reads_no_more_than_it_must(folder: Path) -> None:
    assert head(folder, 3).num_rows == 3
    assert head(folder, 0).num_rows == 0
    assert head(folder, 10**9).num_rows == len(view(folder))
    last = sorted(folder.glob("routing-*"))[-1]
    last.write_bytes(b"PAR1")
    assert head(folder, 3, "routing").num_rows == 3
    with pytest.raises(TraceError, match=last.name):
        reader(folder).read_all()


def test_descriptions(folder: Path) -> None:
    assert present(folder) == list(TABLES)
    about = {column["name"]: column["type"] for column in describe(folder, "routing")["columns"]}
    assert about["expert_ids"] == "uint16[2]"
    assert about["weights"] == "float[2]"
    with pytest.raises(TraceError, match="there is no table 'token'; did you mean 'tokens'"):
        view(folder, "token")
    bare = write(folder.parent / "b", manifest(SHAPE), diffusion(SHAPE))
    assert present(bare) == [LONG, "forwards", "tokens", "routing"]
    with pytest.raises(TraceError, match="has no table 'scores'"):
        view(bare, "scores")


def test_readers_are_arrow_streams(folder: Path) -> None:
    found = reader(folder)
    assert isinstance(found, pa.RecordBatchReader)
    assert sum(batch.num_rows for batch in found) == len(view(folder))


@pytest.mark.parametrize("table", TABLES)
def test_examples_say_the_same_in_sql_and_in_pandas(folder: Path, table: str) -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    connection = duckdb.connect()
    connection.register(table, reader(folder, table).read_all())
    asked = connection.sql(TABLES[table].query).fetchall()
    frame = eval(TABLES[table].frame, {table: view(folder, table)})
    found = frame.reset_index().to_numpy(object)
    values = found.shape[1] - frame.index.nlevels
    assert len(asked[0]) == found.shape[1]
    # rows of the same count may stand in another order
    ours = sorted(tuple(map(float, row[-values:])) for row in found)
    theirs = sorted(tuple(map(float, row[-values:])) for row in asked)
    np.testing.assert_allclose(ours, theirs)
