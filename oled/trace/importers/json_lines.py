"""Files of JSON objects, one a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields, parse_json
from oled.trace.importers.arrays import damage


def json_lines(path: Path, longest: int) -> Iterator[JsonFields]:
    """Yield each line's object, blank lines left out.

    Raises: TraceError naming the line that is longer than `longest` bytes or no JSON object, or the
    file where it holds no lines.
    """
    empty = True
    with damage(path, "JSON lines"), path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > longest:
                raise TraceError(f"{where}: longer than {longest} bytes")
            if line.strip():
                empty = False
                yield JsonFields(parse_json(line.decode("utf-8"), where), where)
    if empty:
        raise TraceError(f"{path}: holds no lines")
