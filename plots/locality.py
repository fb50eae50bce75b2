"""What a trace shows: overlap by gap, persistence by confidence, active experts, popularity.

Reads what `oled stats TRACE --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("overlap", "boundary", "persistence", "active", "popularity", "layers")

Pair = Mapping[str, Any]

SIDES = {  # which set the overlap is a share of: label, colour, dashes, marker
    "of_new": ("of the newer set", "#d94801", "solid", "o"),
    "of_old": ("of the older set", "#525252", "dashed", "s"),
}
TRANSITIONS = {
    "masked_to_masked": ("stays masked", "#4292c6", "solid", "o"),
    "masked_to_decoded": ("is opened", "#d94801", "dashed", "s"),
    "decoded_to_decoded": ("was open", "#08306b", "solid", "^"),
    "all": ("all tokens", "#000000", "dotted", ""),
}


def draw(found: Mapping[str, Any], control: float | None = None) -> Figure:
    """Draw four panels; one for which the trace has no data says so.

    `control` is the overlap of newer sets with forwards that have nothing to do with them.
    """
    with style.styled():
        figure = Figure(figsize=(style.PAGE_IN, 4.8))
        (overlap, persistence), (active, popularity) = figure.subplots(2, 2)
        _draw_overlap(overlap, found, control)
        _draw_persistence(persistence, found["persistence"])
        _draw_active(active, found)
        _draw_popularity(popularity, found)
    return figure


def _absent(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, f"no {what} in this trace", ha="center", va="center", color="0.4")
    axes.set_axis_off()


def _draw_overlap(axes: Axes, found: Mapping[str, Any], control: float | None) -> None:
    """Draw overlap by gap inside a block, and across the boundary of blocks at the right."""
    gaps = {int(gap): pair for gap, pair in found["overlap"].items() if pair}
    if not gaps:
        _absent(axes, "neighbouring forwards")
        return
    boundary = (found["boundary"] or {}).get("after_denoise")
    across = max(gaps) + 1.5
    for side, (label, color, dashes, marker) in SIDES.items():
        _draw_side(axes, list(gaps), list(gaps.values()), side, color, dashes, marker)
        axes.plot([], [], color=color, ls=dashes, marker=marker, label=label)
        if boundary:
            _draw_side(axes, [across], [boundary], side, color, dashes, marker)
    axes.plot([], [], color="0.4", ls="dotted", marker="_", label="by chance")
    if control is not None:
        axes.axhline(control, color="0.4", ls="dashdot", lw=0.9, label="other requests")
    axes.set_xticks([*gaps, *([across] if boundary else [])])
    axes.set_xticklabels([*map(str, gaps), *(["next\nblock"] if boundary else [])])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"gap in forwards within one {_chain(found)}")
    axes.set_ylabel("overlap of active sets\n(95 % over requests)")
    _legend(axes, 3 if control is None else 2)


def _legend(axes: Axes, columns: int) -> None:
    """Put the legend above the panel: nothing is covered, whatever the data are."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, columnspacing=0.8)


def _chain(found: Mapping[str, Any]) -> str:
    return "block" if found["chain"] == "denoise" else "request"


def _draw_side(
    axes: Axes,
    places: Sequence[float],
    pairs: Sequence[Pair],
    side: str,
    color: str,
    dashes: str,
    marker: str,
) -> None:
    """Draw means with 95 % intervals over requests, and what chance gives."""
    values = [pair[side]["value"] for pair in pairs]
    lows, highs = zip(*(_interval(pair[side]) for pair in pairs), strict=True)
    spread = [
        [value - low for value, low in zip(values, lows, strict=True)],
        [high - value for value, high in zip(values, highs, strict=True)],
    ]
    axes.errorbar(
        places, values, spread, color=color, ls=dashes, marker=marker, capsize=1.5, elinewidth=0.7
    )
    chance = [pair[f"chance_{side}"] for pair in pairs]
    axes.plot(places, chance, color=color, ls="dotted", lw=0.8, marker="_", ms=5)


def _interval(estimate: Mapping[str, Any]) -> tuple[float, float]:
    """Return the interval's ends; it has no length where there is one request only."""
    if estimate["low"] is None:
        return estimate["value"], estimate["value"]
    return estimate["low"], estimate["high"]


def _draw_persistence(axes: Axes, kept: Mapping[str, Any] | None) -> None:
    """Draw the share of a token's experts that stay, by confidence and by what becomes of it."""
    if kept is None:
        _absent(axes, "token that two forwards share")
        return
    cells = [*kept["by_confidence_and_transition"], *kept["by_confidence"]]
    for name, (label, color, dashes, marker) in TRANSITIONS.items():
        own = [cell for cell in cells if cell["transition"] == name]
        middles = [(cell["confidence_low"] + cell["confidence_high"]) / 2 for cell in own]
        heights = [cell["persistence"] for cell in own]
        axes.plot(middles, heights, color=color, ls=dashes, marker=marker, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("confidence of the token")
    axes.set_ylabel("experts kept")
    _legend(axes, 4)


def _draw_active(axes: Axes, found: Mapping[str, Any]) -> None:
    """Draw the distinct experts of a forward by layer, beside one token's."""
    if found["active"] is None:
        _absent(axes, "order of forwards")
        return
    layers = found["layers"]
    axes.bar(range(len(layers)), found["active"]["by_layer"], color="#9ecae1", edgecolor="black")
    axes.axhline(found["top_k"], color="black", ls="dashed", lw=0.9, label="one token")
    step = max(1, len(layers) // 10)
    axes.set_xticks(range(0, len(layers), step), layers[::step])
    axes.set_xlabel("layer")
    axes.set_ylabel(f"active experts of {max(found['experts'])}")
    _legend(axes, 1)


def _draw_popularity(axes: Axes, found: Mapping[str, Any]) -> None:
    """Draw the share of routed tokens that the most popular experts serve; one line a layer."""
    shares = found["popularity"]["sorted_shares"]
    for place, layer in enumerate(shares):
        grey = 0.75 * (1 - place / max(1, len(shares) - 1))
        outer = place in (0, len(shares) - 1)
        label = f"layer {found['layers'][place]}" if outer else None
        experts = [(rank + 1) / len(layer) for rank in range(len(layer))]
        axes.plot([0, *experts], [0, *accumulate(layer)], color=str(grey), label=label)
    axes.plot([0, 1], [0, 1], color="black", ls="dotted", lw=0.8, label="evenly spread")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("experts, most popular first")
    axes.set_ylabel("share of routed tokens")
    _legend(axes, 3)
