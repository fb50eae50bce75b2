"""How every figure looks: one colour, hatch and marker a policy, one line a reference."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.colors
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLUMN_IN, PAGE_IN = 3.35, 7.0
RECORDED = "bundled model"
PALE = 2.6  # sum of red, green and blue above which a line would not be seen


@dataclass(frozen=True, slots=True)
class Look:
    """A policy in bars (colour, hatch) and in lines (colour, marker)."""

    label: str
    color: str
    hatch: str
    marker: str


@dataclass(frozen=True, slots=True)
class Line:
    """A reference drawn across a figure; the broad one lies under those that may cover it."""

    label: str
    color: str
    dashes: str | tuple[int, tuple[int, ...]]
    width: float = 0.9


# Plain caches are greys, systems are blue and green, retentions alone violet, the OLED family warm;
# neighbours in a figure differ in lightness or in hatch, so that it reads without colour.
POLICIES = {
    "no_cache": Look("no cache", "#ffffff", "", "x"),
    "naive_lru": Look("naive LRU", "#f0f0f0", "....", "o"),
    "lru": Look("LRU", "#d0d0d0", "", "s"),
    "lfu": Look("LFU", "#a8a8a8", "////", "^"),
    "lfu_aged": Look("LFU, aged", "#a8a8a8", "", "v"),
    "lrfu": Look("LRFU", "#8f8f8f", "\\\\\\\\", "<"),
    "in_cache_lfu": Look("LFU in cache", "#787878", "", ">"),
    "least_stale": Look("least stale", "#787878", "....", "p"),
    "front_loaded": Look("front-loaded LRU", "#d0d0d0", "xxxx", "h"),
    "static_popularity": Look("static popularity", "#f0f0f0", "++++", "8"),
    "cpu_all": Look("all on CPU", "#deebf7", "\\\\\\\\", "P"),
    "ktransformers": Look("KTransformers", "#c6dbef", "", "p"),
    "fiddler": Look("Fiddler", "#9ecae1", "xxxx", "<"),
    "hybrimoe": Look("HybriMoE", "#6baed6", "", ">"),
    "dali": Look("DALI", "#4292c6", "////", "h"),
    "llama_cpp": Look("llama.cpp", "#2171b5", "", "*"),
    "llama_cpp_cache": Look("llama.cpp, cache", "#084594", "....", "X"),
    "moe_infinity": Look("MoE-Infinity", "#c7e9c0", "....", "D"),
    "finemoe": Look("FineMoE", "#a1d99b", "", "d"),
    "mixtral_offloading": Look("Mixtral-offloading", "#74c476", "////", "v"),
    "promoe": Look("ProMoE", "#31a354", "", "^"),
    "tide": Look("TIDE", "#006d2c", "xxxx", "8"),
    "saem": Look("SAEM", "#41ab5d", "\\\\\\\\", "P"),
    "temporal_router": Look("Temporal Router", "#7fcdbb", "", "<"),
    "spatio_temporal_router": Look("Spatio-Temporal Router", "#41b6c4", "////", ">"),
    "spice": Look("SPICE", "#225ea8", "", "D"),
    "spice_exact": Look("SPICE, all exact", "#225ea8", "////", "d"),
    "draftexpert": Look("DraftExpert", "#253494", "++++", "X"),
    "saem_oracle": Look("SAEM, clairvoyant", "#00441b", "....", "*"),
    "static_ep": Look("static placement", "#f7fbff", "", "o"),
    "eplb": Look("EPLB", "#6baed6", "++++", "s"),
    "epic": Look("EPIC", "#08306b", "", "D"),
    "des_seq": Look("DES-Seq", "#fde0dd", "", "^"),
    "des_vote": Look("DES-Vote", "#fa9fb5", "////", "v"),
    "block_pool": Look("block pool", "#dd3497", "", "h"),
    "block_pool_fixed": Look("block pool, fixed (ours)", "#dd3497", "xxxx", "H"),
    "pcomoe": Look("PCoMoE", "#7a0177", "....", "d"),
    "mrs": Look("MRS", "#dadaeb", "", "<"),
    "mrs_wide": Look("MRS, wide", "#dadaeb", "////", ">"),
    "windowed": Look("windowed", "#bcbddc", "....", "h"),
    "expert_count": Look("tokens per expert", "#9e9ac8", "", "s"),
    "gate_sum": Look("gate weight", "#807dba", "\\\\\\\\", "o"),
    "probability_visits": Look("probability x visits", "#6a51a3", "", "D"),
    "prefetch_dial": Look("prefetch dial", "#54278f", "xxxx", "P"),
    "inter_iteration": Look("inter-iteration", "#fdae6b", "", "o"),
    "state_gate": Look("state gate (ours)", "#fee6ce", "....", "p"),
    "two_timescale": Look("two-timescale (ours)", "#fee6ce", "++++", "h"),
    "oled_priority": Look("OLED Priority", "#f16913", "\\\\\\\\", "s"),
    "oled_layeradapt": Look("OLED +LayerAdapt", "#d94801", "////", "^"),
    "oled": Look("OLED", "#a63603", "", "D"),
    "oled_exact": Look("OLED, exact (ours)", "#7f2704", "xxxx", "v"),
    "oled_fill": Look("OLED, fill (ours)", "#7f2704", "....", "P"),
    "oled_marginal": Look("OLED, marginal (ours)", "#fd8d3c", "++++", "<"),
    "belady": Look("Belady, demand", "#8a8a8a", "++++", "v"),
    "oracle": Look("Belady, bypass", "#252525", "", "d"),
    "oracle_pooled": Look("Belady, pooled", "#252525", "....", "d"),
}
_OTHERS = ("#bcbddc", "#9e9ac8", "#756bb1", "#54278f", "#fa9fb5", "#dd3497", "#7a0177")
_HATCHES = ("", "////", "....", "xxxx", "++++")
_MARKERS = ("o", "s", "^", "D", "v")

REFERENCES = {
    "ideal": Line("ideal, all hits", "#8c8c8c", "solid", 2.6),
    "all_resident": Line("all resident", "#000000", (0, (5, 2))),
    "bound_relaxed": Line("lower bound", "#000000", (0, (1, 1))),
    "ref_belady_uniform": Line("Belady, copies", "#7b3294", (0, (3, 1, 1, 1))),
}


def look(policy: str) -> Look:
    """Return a policy's look; a paper's code has the paper's; others get one by their name."""
    plain = policy.removesuffix("_artefact")
    if plain in POLICIES:
        known = POLICIES[plain]
        return known if plain == policy else replace(known, label=f"{known.label}, code")
    code = zlib.crc32(policy.encode())
    return Look(
        policy,
        _OTHERS[code % len(_OTHERS)],
        _HATCHES[code // 7 % len(_HATCHES)],
        _MARKERS[code // 35 % len(_MARKERS)],
    )


@contextmanager
def styled() -> Iterator[None]:
    """Use the project's settings, whatever the user's own are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rc_file(Path(__file__).with_name("oled.mplstyle"), use_default_template=False)
        yield


def shape(table: pd.DataFrame) -> pd.Series[str]:
    """Name whose routing each row replays: a made-up model's geometry, or the bundled model."""
    return table["trace.geometry"].fillna(RECORDED)


def bars(axes: Axes, policies: list[str], heights: list[float]) -> None:
    """Draw one bar a policy, in the order given."""
    for place, (policy, height) in enumerate(zip(policies, heights, strict=True)):
        shape = look(policy)
        axes.bar(place, height, 0.8, color=shape.color, hatch=shape.hatch, edgecolor="black")
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(policies) - 0.3)


def patches(policies: Iterable[str]) -> list[Artist]:
    """Return entries of a legend for bars."""
    looks = [look(policy) for policy in policies]
    return [
        Patch(facecolor=one.color, hatch=one.hatch, edgecolor="black", label=one.label)
        for one in looks
    ]


def references(names: Iterable[str]) -> list[Artist]:
    """Return entries of a legend for references."""
    shapes = [REFERENCES[name] for name in names]
    return [
        Line2D([], [], color=one.color, ls=one.dashes, lw=one.width, label=one.label)
        for one in shapes
    ]


def line(
    axes: Axes,
    policy: str,
    places: Sequence[float],
    heights: Sequence[float],
    dashes: str = "solid",
) -> None:
    """Draw a policy over a number; those that are pale as bars get a grey line."""
    shape = look(policy)
    pale = sum(mpl.colors.to_rgb(shape.color)) > PALE
    axes.plot(
        places,
        heights,
        color="0.6" if pale else shape.color,
        ls=dashes,
        marker=shape.marker,
        mfc=shape.color,
        mec="black",
        mew=0.4,
        label=shape.label,
    )


def logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic, with numbers that people read: 1, 2, 5, 10."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def reference(axes: Axes, name: str, places: Sequence[float], heights: Sequence[float]) -> None:
    """Draw a reference over a number."""
    shape = REFERENCES[name]
    axes.plot(places, heights, color=shape.color, ls=shape.dashes, lw=shape.width, zorder=1)


def legend(figure: Figure, policies: Iterable[str], beside: Iterable[str], columns: int) -> None:
    """Put the policies' lines, then the references, below the panels."""
    handles: list[Artist] = []
    for policy in policies:
        axes = Figure().subplots()
        line(axes, policy, [], [])
        handles += axes.get_lines()
    handles += references(beside)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Save NAME.png and NAME.pdf, the same bytes whenever the figure is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    with styled():
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]
