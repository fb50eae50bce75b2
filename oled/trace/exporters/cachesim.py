"""Requests to a cache, as cache simulators read them: libCacheSim's oracleGeneral and CSV.

An object is an expert of a layer: id = layer * 65536 + expert, of that layer's expert's bytes; time
is the number of the forward. `access=step` (default) asks for each active expert once in a
layer-step, by id: what `oled` counts as accesses. `access=token` asks once for each (token, slot).
Pads and zero experts, which load nothing, do not occur. Forwards come as they were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from oled.trace.errors import TraceError
from oled.trace.longform import active_windows, distinct
from oled.trace.options import Options
from oled.trace.stream import TraceStream
from oled.types import Array, Ints

ACCESS = ("step", "token")
RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""oracleGeneral: 24 bytes without padding; `next` is the number of the object's next request."""
NEVER = -1

Accesses = Array  # of RECORD


def to_oracle_general(stream: TraceStream, path: Path, options: Options) -> None:
    """Write requests as they come; the `next` of an earlier one is filled in later."""
    latest: dict[int, int] = {}  # number of an object's last request
    total = 0
    with path.open("wb") as file:
        for requests in _accesses(stream, options):
            numbers = total + np.arange(len(requests))
            order = np.argsort(requests["object"], kind="stable")
            objects, sorted_numbers = requests["object"][order], numbers[order]
            again = objects[1:] == objects[:-1]
            requests["next"][order[:-1][again]] = sorted_numbers[1:][again]
            file.write(requests.tobytes())
            file.flush()
            firsts = np.append(True, ~again)
            lasts = np.append(~again, True)
            _fill_in(path, latest, objects[firsts], sorted_numbers[firsts])
            latest.update(zip(objects[lasts].tolist(), sorted_numbers[lasts].tolist(), strict=True))
            total += len(requests)


def _fill_in(path: Path, latest: dict[int, int], objects: Array, numbers: Ints) -> None:
    """Tell the last request of each of these objects about its next one."""
    known = [
        (latest[item], number)
        for item, number in zip(objects.tolist(), numbers.tolist(), strict=True)
        if item in latest
    ]
    if known:
        place, following = np.array(known).T
        np.memmap(path, RECORD, "r+")["next"][place] = following


def to_libcachesim_csv(stream: TraceStream, path: Path, options: Options) -> None:
    """Write time,obj_id,obj_size with a header line."""
    names = {"time": "time", "obj_id": "object", "obj_size": "size"}
    schema = pa.schema([("time", pa.uint32()), ("obj_id", pa.uint64()), ("obj_size", pa.uint32())])
    bare = pa.csv.WriteOptions(include_header=False)
    with path.open("wb") as file, pa.csv.CSVWriter(file, schema, write_options=bare) as writer:
        file.write(b"time,obj_id,obj_size\n")  # Arrow would put quotes around the names
        for requests in _accesses(stream, options):
            columns = [np.ascontiguousarray(requests[names[field.name]]) for field in schema]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _accesses(stream: TraceStream, options: Options) -> Iterator[Accesses]:
    geometry = stream.manifest.geometry
    if max(geometry.expert_bytes) >= 1 << 32:
        raise TraceError("the format counts bytes of an object in 32 bits; experts are larger")
    by_token = options.choice("access", ACCESS, "step") == "token"
    sizes = np.array(geometry.expert_bytes, dtype=np.uint32)
    layers = np.array(geometry.moe_layers)
    for columns, place in active_windows(stream):
        key = (columns["forward"] << 32) | (place << 16) | columns["expert"]
        if not len(key):
            continue  # forwards that were routed nowhere
        if not by_token:
            key = distinct(key)
        place = (key >> 16) & 0xFFFF
        found = np.zeros(len(key), dtype=RECORD)
        found["time"] = key >> 32
        found["object"] = (layers[place] << 16) | (key & 0xFFFF)
        found["size"] = sizes[place]
        found["next"] = NEVER
        yield found
