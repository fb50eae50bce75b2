"""Timelines of four kinds of system on the same block: prefetch, partial CPU, cache, OLED."""

from __future__ import annotations

import pandas as pd

from oled import Synthetic, simulate
from oled.bundled.plots.fig03 import draw
from oled.bundled.studies import common
from oled.results import table as results
from oled.sim.prepared import PreparedTrace
from oled.sim.timeline import LANES
from oled.sim.window import first_block
from oled.studies.reproduce import UNKNOWN, Claim, Run, markdown

__all__ = ["TITLE", "claims", "draw", "rows", "summary"]

TITLE = "Figure 3: where the time of a block goes"
KINDS = {
    "mixtral_offloading": "prefetch",
    "fiddler": "partial CPU",
    "inter_iteration": "inter-iteration cache",
    "oled": "OLED",
}


def rows(run: Run) -> pd.DataFrame:
    """Return the simulator's own slices of the second forward of the first block."""
    spec = Synthetic(requests=2, scores=common.SCORES, horizons=3)
    subject, learned = (
        PreparedTrace.of(spec.folder()),
        PreparedTrace.of(spec.calibration().folder()),
    )
    first = first_block(subject.steps)[0] + 1
    found = []
    for policy in KINDS:
        result = simulate(
            subject,
            policy,
            hardware=common.MINI["hardware"],
            slots=40,
            calibration=learned,
            timeline=(first, 1),
            references=False,
        )
        events = result.timeline.events() if result.timeline else []
        slices = [event for event in events if event["ph"] == "X"]
        begin = min(event["ts"] for event in slices)
        for event in slices:
            found.append(
                {
                    "policy": policy,
                    "lane": LANES[event["tid"]],
                    "what": event["cat"],
                    "begin_us": event["ts"] - begin,
                    "length_us": event["dur"],
                    "provenance.trace": subject.name,
                    "provenance.trace_hash": subject.hash,
                    "hardware": common.MINI["hardware"],
                }
            )
    run.out.mkdir(parents=True, exist_ok=True)
    return results.write_table(found, run.out / results.TABLE)


def summary(table: pd.DataFrame) -> str:
    ends = (table["begin_us"] + table["length_us"]).groupby(table["policy"], sort=False).max()
    busy = table.pivot_table("length_us", "policy", "lane", aggfunc="sum", sort=False).fillna(0)
    shown = busy.div(ends, axis=0).map("{:.0%}".format).loc[list(KINDS)]
    shown.insert(0, "forward, ms", [f"{ends[policy] / 1e3:.2f}" for policy in shown.index])
    shown.insert(0, "kind", [KINDS[policy] for policy in shown.index])
    return "Length of the drawn forward, and how busy each lane is in it.\n\n" + markdown(
        shown.rename_axis("policy").reset_index()
    )


def claims(table: pd.DataFrame) -> list[Claim]:
    return [
        Claim("the paper's figure is not public; ours shows the same four kinds", "-", "-", UNKNOWN)
    ]
