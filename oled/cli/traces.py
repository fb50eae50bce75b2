"""The verbs that turn traces into other things: import, export, slice, merge, view."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oled.cli.usage import UsageError
from oled.cli.verbs import Arguments, Subparsers, add_verb
from oled.paths import trace_path
from oled.results.text import aligned

VERBS = {
    "import": "a trace from another tool's recording",
    "export": "a trace as a file that other tools read",
    "slice": "some requests, layers or forwards of a trace, as a trace",
    "merge": "several traces of one model as one trace",
    "view": "the tables of a trace: columns, a query, the first rows",
}
TRACE = "a folder, or the name of a bundled trace"
SLICE_KEYS = {
    "requests": "as 0-9,12",
    "layers": "absolute ids of MoE layers, as 1-4",
    "forwards": "as 0-99",
    "drop": "side tables to leave out: scores,predictions",
}


def add_verbs(verbs: Subparsers[argparse.ArgumentParser]) -> None:
    importer = add_verb(verbs, "import", VERBS["import"], _import)
    importer.add_argument("format", metavar="FORMAT", help="see oled list formats")
    importer.add_argument("source", metavar="SRC", type=Path, help="a file, or a folder of them")
    importer.add_argument("trace", metavar="DST", type=Path, help="the folder to write")
    importer.add_argument("options", metavar="key=value", nargs="*", help="see oled list formats")

    exporter = add_verb(verbs, "export", VERBS["export"], _export, partial=True)
    exporter.add_argument("format", metavar="FORMAT", help="see oled list exports")
    exporter.add_argument("trace", metavar="TRACE", help=TRACE)
    exporter.add_argument("file", metavar="DST", type=Path, help="the file to write")
    exporter.add_argument("options", metavar="key=value", nargs="*", help="see oled list exports")

    slicer = add_verb(verbs, "slice", VERBS["slice"], _slice, partial=True)
    slicer.add_argument("trace", metavar="TRACE", help=TRACE)
    slicer.add_argument("folder", metavar="DST", type=Path, help="the folder to write")
    keys = "; ".join(f"{key}: {text}" for key, text in SLICE_KEYS.items())
    slicer.add_argument("options", metavar="key=value", nargs="*", help=keys)

    merger = add_verb(verbs, "merge", VERBS["merge"], _merge, partial=True)
    merger.add_argument("traces", metavar="TRACE", nargs="+", help=TRACE)
    merger.add_argument("folder", metavar="DST", type=Path, help="the folder to write")

    viewer = add_verb(verbs, "view", VERBS["view"], _view, json_too=True, partial=True)
    viewer.add_argument("trace", metavar="TRACE", help=TRACE)
    viewer.add_argument("--table", metavar="NAME", help="this one instead of all")
    viewer.add_argument("--head", metavar="N", type=int, default=0, help="also the first N rows")


@contextmanager
def _usage() -> Iterator[None]:
    """Options and names that do not exist are wrong usage."""
    from oled.trace.options import OptionError

    try:
        yield
    except OptionError as error:
        raise UsageError(str(error)) from None


def _import(arguments: Arguments) -> int:
    from oled.trace.importers import import_trace
    from oled.trace.options import split_words

    with _usage():
        options = split_words(arguments.options)
        print(import_trace(arguments.format, arguments.source, arguments.trace, options))
    return 0


def _export(arguments: Arguments) -> int:
    from oled.trace.exporters import export_trace
    from oled.trace.options import split_words

    with _usage():
        options = split_words(arguments.options)
        trace = trace_path(arguments.trace)
        partial = arguments.partial
        print(export_trace(arguments.format, trace, arguments.file, options, allow_partial=partial))
    return 0


def _slice(arguments: Arguments) -> int:
    from oled.trace.cut import slice_trace
    from oled.trace.options import Options
    from oled.trace.ranges import Ranges

    with _usage():
        options = Options.parse(arguments.options, SLICE_KEYS, "slice")
        sets = {
            key: Ranges.parse(text, key)
            for key in ("requests", "layers", "forwards")
            if (text := options.text(key)) is not None
        }
        drop = (options.text("drop") or "").split(",") if options.has("drop") else ()
    trace = trace_path(arguments.trace)
    print(slice_trace(trace, arguments.folder, **sets, drop=drop, allow_partial=arguments.partial))
    return 0


def _merge(arguments: Arguments) -> int:
    from oled.trace.merge import merge_traces

    traces = [trace_path(trace) for trace in arguments.traces]
    print(merge_traces(traces, arguments.folder, allow_partial=arguments.partial))
    return 0


def _view(arguments: Arguments) -> int:
    from oled.trace.view import TABLES, describe, head, present

    trace, partial = trace_path(arguments.trace), arguments.partial
    if arguments.head < 0:
        raise UsageError(f"--head {arguments.head}: must not be negative")
    tables = present(trace, allow_partial=partial)
    if arguments.table is not None:
        if arguments.table not in TABLES:
            raise UsageError(f"there is no table '{arguments.table}'; known: {', '.join(TABLES)}")
        tables = [arguments.table]
    shown = []
    for table in tables:
        rows = _known(head(trace, arguments.head, table, allow_partial=partial).to_pylist())
        shown.append({**describe(trace, table, allow_partial=partial), "rows": rows})
    if arguments.json:
        print(json.dumps(shown, indent=1))
    else:
        print("\n\n".join("\n".join(_lines(table)) for table in shown))
    return 0


def _known(value: Any) -> Any:
    """Rows for JSON, which knows no NaN."""
    match value:
        case dict():
            return {key: _known(item) for key, item in value.items()}
        case list():
            return [_known(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    return value


def _lines(table: dict[str, Any]) -> Iterator[str]:
    """A table's description for people."""
    yield f"{table['table']}: {table['summary']}"
    rows = [(c["name"], c["type"], c["meaning"]) for c in table["columns"]]
    yield aligned(rows, indent="  ")
    yield f"  SQL     {table['query']}"
    yield f"  pandas  {table['frame']}"
    if table["rows"]:
        names = tuple(table["rows"][0])
        yield ""
        yield aligned([tuple(map(_cell, r.values())) for r in table["rows"]], names, indent="  ")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + " ".join(map(_cell, value)) + "]"
    return "-" if value is None else str(value)
