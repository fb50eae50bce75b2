"""The whole job on the bundled model: record, check, replay every policy, compare.

Everything goes to one folder. Bytes and times are those of LLaDA2.0-mini (`cost.geometry`): the
bundled model's own experts are so small that every copy would be latency alone.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from oled.errors import UserError
from oled.paths import traces_dir
from oled.results import table as results

if TYPE_CHECKING:
    from oled.sim.prepared import PreparedTrace

log = logging.getLogger(__name__)

POLICIES = (
    "naive_lru",
    "lru",
    "lfu",
    "cpu_all",
    "fiddler",
    "dali",
    "inter_iteration",
    "oled_priority",
    "oled_layeradapt",
    "oled",
    "oracle",
)
SLOTS = (20, 50)  # of 128: the shares of the paper's 40 and 100 of 256
GEOMETRY = "llada2_mini"
TIMELINE_OF = "oled"
NEW_TOKENS = 96
TOKENS_PER_FORWARD = 2  # LLaDA2.0 opens 2.4 to 2.6; the small model is rarely above its threshold

README = """\
Made by `oled demo`, which replaces it when it runs again.

trace/            the routing of the bundled model on six prompts: oled check, oled stats
results.parquet   one row a policy and cache size
fig05.png, .pdf   the rows as a figure
timeline.json.gz  one block under {policy}: opens in ui.perfetto.dev
"""


def demo(out: Path, *, device: str = "auto") -> str:
    """Run the job into `out`; return the closing table and the paths."""
    _prepare(out)
    compiling = subprocess.Popen(
        [sys.executable, "-c", "from oled.studies import demo; demo.compile_ahead()"]
    )
    subject = _record(out / "trace", device)
    log.info("waiting for the simulator to be compiled (first run only)")
    compiling.wait()
    table = results.write_table(_replay(subject), out / results.TABLE)
    _draw_timeline(subject, out / "timeline.json.gz")
    figures = _draw_figure(table, out)
    paths = [out / "trace", out / results.TABLE, *figures, out / "timeline.json.gz"]
    return "\n".join([results.comparison(table), "", *map(str, paths)])


def _prepare(out: Path) -> None:
    """Make room: an earlier demo is replaced, anything else is left alone."""
    readme = out / "README.txt"
    text = README.format(policy=TIMELINE_OF)
    if out.exists() and any(out.iterdir()):
        if not readme.is_file() or readme.read_text(encoding="utf-8") != text:
            raise UserError(f"{out} holds something other than a demo: choose another out=DIR")
        shutil.rmtree(out / "trace", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    readme.write_text(text, encoding="utf-8")


def compile_ahead() -> None:
    """Compile what the replay needs, in a process of its own while the model decodes."""
    from oled.sim.api import simulate
    from oled.sim.prepared import PreparedTrace

    learned = PreparedTrace.of("calibration")
    for policy in POLICIES:
        simulate("demo", policy, geometry=GEOMETRY, calibration=learned, timeline=(0, 1))


def _record(folder: Path, device: str) -> PreparedTrace:
    log.info("recording: the bundled model decodes six prompts")
    import torch

    from oled.record import BlockDiffusion, load_model, load_prompts, record
    from oled.sim.prepared import PreparedTrace
    from oled.trace.check import check

    loaded = load_model("tiny", device)
    if loaded.model.device.type == "cpu":
        torch.set_num_threads(1)  # faster for matrices this small, and leaves a core to compile on
    decode = BlockDiffusion(
        block_length=16, max_new_tokens=NEW_TOKENS, tokens_per_forward=TOKENS_PER_FORWARD
    )
    prompts = load_prompts(traces_dir() / "prompts.jsonl")
    report = record(loaded, prompts, decode, folder, horizons=1)
    log.info("%s", report)
    found = check(folder)
    if not found.ok:
        raise UserError("; ".join(found.lines()))
    log.info("checked: %s", found.lines()[-1])
    return PreparedTrace.of(folder)


def _replay(subject: PreparedTrace) -> list[dict[str, Any]]:
    from tqdm import tqdm

    from oled.sim.api import simulate
    from oled.sim.prepared import PreparedTrace

    learned = PreparedTrace.of("calibration")  # on other prompts
    runs = [(policy, slots) for slots in SLOTS for policy in POLICIES]
    rows = []
    for policy, slots in tqdm(runs, unit="run", disable=None):
        result = simulate(subject, policy, slots=slots, geometry=GEOMETRY, calibration=learned)
        rows.append(
            {
                "policy": policy,
                "slots": str(slots),
                "error": None,
                **results.flatten(result.metrics),
            }
        )
    return rows


def _draw_timeline(subject: PreparedTrace, file: Path) -> None:
    from oled.sim.api import simulate
    from oled.sim.window import first_block

    window = first_block(subject.steps)
    result = simulate(
        subject, TIMELINE_OF, slots=SLOTS[0], geometry=GEOMETRY, timeline=window, references=False
    )
    if result.timeline is not None:
        result.timeline.write(file)


def _draw_figure(table: pd.DataFrame, out: Path) -> list[Path]:
    figure = importlib.import_module("oled.bundled.plots.fig05").draw(table)
    saved: list[Path] = importlib.import_module("oled.bundled.plots.style").save(
        figure, out, "fig05"
    )
    return saved
