"""Convert public recordings of full-size models into the bundled traces of these names.

    python experiments/training/real_traces.py --data ../shared/data/routing --out .work/traces

Each recording is read by the importer of its format and cut to what the repository carries.
traces/README.md says where the files come from; the same files give the same bytes.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oled.trace.cut import slice_trace
from oled.trace.importers import import_trace
from oled.trace.ranges import Ranges

log = logging.getLogger("real_traces")


@dataclass(frozen=True, slots=True)
class Recording:
    """A public file, and what of it is kept."""

    format: str
    file: str
    options: Mapping[str, str] = field(default_factory=dict)
    requests: str | None = None
    forwards: str | None = None


RECORDINGS = {
    "gpt_oss_20b": Recording(
        "token_arrays",
        "gptoss20b/gptoss20b_decode.npz",
        {"model": "gpt_oss_20b", "weights": "softmax_selected"},
    ),
    # three matrices of 2048 x 512 at 4.5 bits a weight: 4, and two halves in groups of 64
    "qwen36_35b": Recording(
        "token_arrays", "qwen36_35b/qwen36_35b.npz", {"expert_bytes": "1769472"}, requests="1"
    ),
    "qwen3_30b_phone": Recording("bigmoeonedge", "bigmoeonedge/qwen.route.csv"),
    "qwen3_30b_code": Recording(
        "cacheable_by_design", "cacheable_by_design/code.npz", forwards="0-5119"
    ),
}


def convert(name: str, data: Path, out: Path) -> Path:
    """Write one of the recordings as a trace folder below `out`."""
    wanted = RECORDINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        whole = import_trace(
            wanted.format, data / wanted.file, Path(folder) / "whole", wanted.options
        )
        cuts = {"requests": wanted.requests, "forwards": wanted.forwards}
        ranges = {key: Ranges.parse(text, key) for key, text in cuts.items() if text is not None}
        return slice_trace(whole, out / name, **ranges)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the public files")
    parser.add_argument("--out", type=Path, required=True, help="a folder a trace goes there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in RECORDINGS:
        log.info("%s", convert(name, args.data, args.out))


if __name__ == "__main__":
    main()
