"""TPOT and hit rate by policy and cache size, beside the references (as the paper's figure 5).

Reads a results table: policy, slots, tpot_ns, hit_rate and the references of every row. Where the
table has several shapes, runtimes, …, each combination is a panel of its own.
"""

from __future__ import annotations

from typing import Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style

NEEDS = ("policy", "slots", "tpot_ns", "hit_rate")
APART = ("trace.geometry", "runtime", "hardware", "scope", "staging", "lifecycle", "batch_size")
TIMES = ("ideal", "all_resident", "bound_relaxed", "ref_belady_uniform")


def draw(table: pd.DataFrame) -> Figure:
    """Draw one column of panels a cache size (shape, runtime): TPOT above, hit rate below."""
    if "trace.geometry" in table:
        table = table.assign(**{"trace.geometry": style.shape(table)})
    places = _places(table)
    policies = sorted(dict.fromkeys(table["policy"]), key=_place)
    with style.styled():
        width = style.COLUMN_IN if len(places) <= 2 else style.PAGE_IN
        figure = Figure(figsize=(width, 3.5))
        share: Literal["row", "none"] = "row" if len(places) <= 2 else "none"
        panels = figure.subplots(2, len(places), sharey=share, squeeze=False)
        for (title, part), (upper, lower) in zip(places.items(), panels.T, strict=True):
            rows = part.set_index("policy")
            shown = [policy for policy in policies if policy in rows.index]
            style.bars(upper, shown, (rows.loc[shown, "tpot_ns"] / 1e6).to_list())
            style.bars(lower, shown, rows.loc[shown, "hit_rate"].to_list())
            for name in TIMES:
                _reference(upper, rows, name, "tpot_ns", 1e-6)
            _reference(lower, rows, "ref_belady_uniform", "hit_rate", 1.0)
            upper.set_title(title, fontsize=8 if len(places) <= 4 else 7)
            lower.set_ylim(0, 1)
        panels[0, 0].set_ylabel("TPOT (ms)")
        panels[1, 0].set_ylabel("hit rate")
        _legend(figure, policies, table, 3 if len(places) <= 2 else 6)
    return figure


def _places(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return title and rows of each panel: the sizes, and what else the table tells apart."""
    keys: list[str] = []
    for key in APART:  # those that say more than the ones before
        if key in table and _differs(table, keys, key):
            keys.append(key)
    places = {}
    for values, part in table.groupby([*keys, "slots"], sort=False):
        named = [_title(key, value) for key, value in zip(keys, values[:-1], strict=True)]
        title = "\n".join([*named, f"{values[-1]} slots a layer"])
        twice = part["policy"][part["policy"].duplicated()]
        if len(twice):
            raise ValueError(
                f"several rows for {twice.iloc[0]} at {title!r}; it tells apart policy, slots, "
                f"{', '.join(APART)} only"
            )
        places[title] = part
    return places


def _differs(table: pd.DataFrame, keys: list[str], key: str) -> bool:
    """Return whether `key` tells rows apart that `keys` do not."""
    values = table.groupby(keys)[key].nunique().max() if keys else table[key].nunique()
    return bool(values > 1)


def _title(key: str, value: object) -> str:
    """Return the words of a panel: names speak for themselves, numbers do not."""
    return f"{key} {value}" if key in ("staging", "batch_size") else str(value)


def _place(policy: str) -> tuple[int, str]:
    known = list(style.POLICIES)
    return (known.index(policy) if policy in known else len(known), policy)


def _reference(axes: Axes, rows: pd.DataFrame, name: str, metric: str, scale: float) -> None:
    column = f"{name}_{metric}"
    if column in rows:
        line = style.REFERENCES[name]
        axes.axhline(rows[column].iloc[0] * scale, color=line.color, ls=line.dashes, lw=line.width)


def _legend(figure: Figure, policies: list[str], table: pd.DataFrame, columns: int) -> None:
    shown = [name for name in style.REFERENCES if f"{name}_tpot_ns" in table]
    handles = [*style.patches(policies), *style.references(shown)]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
