"""TPOT and active experts by block length and by batch size.

Reads a results table: policy, slots, trace.block_length, batch_size, tpot_ns and the counts.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "slots", "trace.block_length", "batch_size", "tpot_ns", "ideal_tpot_ns")
DRAWN = ("ideal", "bound_relaxed")
DASHES = ("solid", "dashed", "dotted", "dashdot")


def active(table: pd.DataFrame) -> pd.Series[float]:
    """Return the distinct experts a layer-step of denoising."""
    phase = "phases.denoise"
    return table[f"{phase}.accesses"] / table[f"{phase}.layer_steps"]


def block_length(table: pd.DataFrame) -> pd.Series[int]:
    """Return the block length of the process, or of the recording by its name (`demo` has 16)."""
    named = table["trace"].str.extract(r"-b(\d+)-")[0].fillna("16")
    return table["trace.block_length"].astype("string").fillna(named).astype(int)


def by_block(table: pd.DataFrame) -> pd.DataFrame:
    """Return rows of one request at a time; of the recordings those that differ in nothing else."""
    own = table[(table["batch_size"] == 1) & (table["trace"] != "demo")]
    own = own.sort_values("block", kind="stable")
    return own.drop_duplicates(["policy", "slots", "block", "trace"])


def by_batch(table: pd.DataFrame) -> pd.DataFrame:
    """Return rows of block length 16, so many requests in lockstep."""
    recorded = table["trace.geometry"].isna() & (table["trace"] != "demo")
    own = table[(table["block"] == 16) & ~recorded].sort_values("batch_size", kind="stable")
    return own.drop_duplicates(["policy", "slots", "batch_size", "trace"])


def draw(table: pd.DataFrame) -> Figure:
    """Draw block lengths left, batch sizes right; TPOT above, active experts below."""
    table = table.assign(block=block_length(table), union=active(table))
    made_up = table[table["trace.geometry"].notna()]
    single, batched = by_block(made_up), by_batch(made_up)
    policies = list(dict.fromkeys(made_up["policy"]))
    with style.styled():
        figure = Figure(figsize=(style.COLUMN_IN, 3.8))
        panels = figure.subplots(2, 2, sharex="col", height_ratios=(2, 1))
        for (upper, lower), rows, key, text in zip(
            panels.T,
            (single, batched),
            ("block", "batch_size"),
            ("block length", "requests in lockstep"),
            strict=True,
        ):
            _times(upper, rows, key, policies)
            own = rows[(rows["policy"] == policies[0])].drop_duplicates(key)
            lower.plot(own[key], own["union"], color="black", marker="o", mfc="white")
            lower.set_ylim(0, 1.15 * max(own["union"]))
            lower.set_xscale("log", base=2)
            ticks = [value for value in own[key] if value & (value - 1) == 0]  # powers of two
            lower.set_xticks(ticks, [str(value) for value in ticks])
            lower.set_xlabel(text)
        panels[0, 0].set_ylabel("TPOT (ms)")
        panels[1, 0].set_ylabel("active experts")
        sizes = list(dict.fromkeys(made_up["slots"]))
        words = ", ".join(f"{size} {dash}" for size, dash in zip(sizes, DASHES, strict=False))
        shape = made_up["trace.geometry"].iloc[0]
        panels[0, 0].set_title(f"{shape}; slots a layer: {words}", loc="left", fontsize=6)
        style.legend(figure, policies, DRAWN, 2)
    return figure


def _times(axes: Axes, rows: pd.DataFrame, key: str, policies: list[str]) -> None:
    sizes = dict.fromkeys(rows["slots"])
    for policy in policies:
        for size, dashes in zip(sizes, DASHES, strict=False):
            own = rows[(rows["policy"] == policy) & (rows["slots"] == size)]
            heights = (own["tpot_ns"] / 1e6).to_list()
            style.line(axes, policy, own[key].to_list(), heights, dashes)
    one = rows[(rows["policy"] == policies[0])].drop_duplicates(key)
    for name in DRAWN:
        style.reference(axes, name, one[key].to_list(), (one[f"{name}_tpot_ns"] / 1e6).to_list())
    style.logarithmic(axes)
