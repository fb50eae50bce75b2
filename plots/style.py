"""How every figure looks: one colour, hatch and marker a policy, one line a reference."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 3.35, 7.0


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


# Plain caches are greys, other systems are cool and the OLED family is warm; neighbours in a figure
# differ in lightness or in hatch, so that it reads without colour.
POLICIES = {
    "no_cache": Look("no cache", "#ffffff", "", "x"),
    "naive_lru": Look("naive LRU", "#f0f0f0", "....", "o"),
    "lru": Look("LRU", "#d0d0d0", "", "s"),
    "lfu": Look("LFU", "#a8a8a8", "////", "^"),
    "cpu_all": Look("all on CPU", "#c6dbef", "\\\\\\\\", "P"),
    "fiddler": Look("Fiddler", "#9ecae1", "xxxx", "<"),
    "hybrimoe": Look("HybriMoE", "#6baed6", "", ">"),
    "dali": Look("DALI", "#4292c6", "////", "h"),
    "ktransformers": Look("KTransformers", "#2171b5", "", "p"),
    "llama_cpp": Look("llama.cpp", "#084594", "\\\\\\\\", "*"),
    "moe_infinity": Look("MoE-Infinity", "#c7e9c0", "....", "1"),
    "finemoe": Look("FineMoE", "#a1d99b", "", "2"),
    "mixtral_offloading": Look("Mixtral-offloading", "#74c476", "////", "3"),
    "promoe": Look("ProMoE", "#31a354", "", "4"),
    "tide": Look("TIDE", "#006d2c", "xxxx", "8"),
    "inter_iteration": Look("inter-iteration", "#fdae6b", "", "o"),
    "oled_priority": Look("OLED Priority", "#f16913", "\\\\\\\\", "s"),
    "oled_layeradapt": Look("OLED +LayerAdapt", "#d94801", "", "^"),
    "oled": Look("OLED", "#7f2704", "", "D"),
    "belady": Look("Belady, demand", "#8a8a8a", "", "v"),
    "oracle": Look("Belady, bypass", "#3a3a3a", "", "D"),
    "oracle_pooled": Look("Belady, pooled", "#1a1a1a", "", "d"),
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
    """The policy's look; one that is not of this project gets one by its name."""
    if policy in POLICIES:
        return POLICIES[policy]
    code = zlib.crc32(policy.encode())
    return Look(
        policy,
        _OTHERS[code % len(_OTHERS)],
        _HATCHES[code // 7 % len(_HATCHES)],
        _MARKERS[code // 35 % len(_MARKERS)],
    )


@contextmanager
def styled() -> Iterator[None]:
    """The project's settings, whatever the user's own are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rc_file(Path(__file__).with_name("oled.mplstyle"), use_default_template=False)
        yield


def bars(axes: Axes, policies: list[str], heights: list[float]) -> None:
    """One bar a policy, in the order given."""
    for place, (policy, height) in enumerate(zip(policies, heights, strict=True)):
        shape = look(policy)
        axes.bar(place, height, 0.8, color=shape.color, hatch=shape.hatch, edgecolor="black")
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(policies) - 0.3)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """NAME.png and NAME.pdf, the same bytes whenever the figure is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    with styled():
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return [png, pdf]
