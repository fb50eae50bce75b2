"""Where a report's experts are: its own words to a placement."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["layers", "share", "cache", "resident", "cpu"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a model's routed experts.

    `layers`: those of `on_cpu` layers lie elsewhere; `share`: the same share of every layer is on
    the GPU for good; `cache`: so much of every layer is a cache; `cpu`: there is no GPU.
    """

    kind: Kind
    on_cpu: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class _Said:
    """A match of a rule, and what the rules need to know."""

    found: re.Match[str]
    text: str
    layers: int
    experts: int
    cached: bool

    def number(self, group: int) -> float:
        return float(self.found[group].replace(",", ""))


def _layers(said: _Said) -> Placement:
    return Placement("layers", on_cpu=min(said.layers, int(said.number(1))))


def _span(said: _Said) -> Placement:
    count = int(said.number(2) - said.number(1)) + 1
    return Placement("layers", on_cpu=min(said.layers, count))


def _whole_layers(said: _Said) -> Placement | None:
    """Whole layers on the CPU, attention too, are not predicted; all on the GPU says nothing."""
    return None if said.number(1) < said.layers else PASS


def _of(said: _Said) -> Placement:
    return _share(said, said.number(1) / said.number(2))


def _percent(said: _Said) -> Placement:
    return _share(said, said.number(1) / 100)


def _slots(said: _Said) -> Placement:
    """More slots than a layer has experts are one pool for all layers."""
    slots, per_layer = said.number(1), said.experts
    whole = per_layer * said.layers if slots > per_layer else per_layer
    return Placement("share" if "static" in said.text else "cache", share=min(1.0, slots / whole))


def _share(said: _Said, share: float) -> Placement:
    fixed = not said.cached or re.search("hottest|static", said.text)
    return Placement("share" if fixed else "cache", share=share)


PASS = Placement("resident")  # no answer: the next rule is asked
_NUMBER = r"(\d+(?:\.\d+)?)"
_Rule = Callable[[_Said], Placement | None]
RULES: tuple[tuple[str, _Rule], ...] = (
    (r"no gpu|none used|^-ngl 0\b", lambda _: Placement("cpu")),
    (r"ffn of last (\d+) layers on cpu", _layers),
    (r"ffn of (\d+)-(\d+) on cpu", _span),
    (r"-ngl (\d+)", _whole_layers),
    (r"all on gpu|all (?:experts )?resident", lambda _: Placement("resident")),
    (r"n-?c(?:pu)?-?moe[ =]*(\d+)", _layers),
    (r"mcl (\d+) of", _layers),
    (r"(\d+) of \d+ layers on cpu", _layers),
    (
        r"^none\b|cpu-moe|-cmoe|exps=cpu|^0 (?:routed )?experts|^0% of|^0 slots|"
        r"no (?:expert )?cache",
        lambda said: Placement("layers", on_cpu=said.layers),
    ),
    (
        rf"split {_NUMBER} of (\d+)",  # of every layer, on the CPU
        lambda said: Placement("share", share=1 - said.number(1) / said.number(2)),
    ),
    (rf"{_NUMBER} of (\d+) (?:hottest )?(?:slots|experts|expert slots)", _of),
    (rf"{_NUMBER}/(\d+) experts", _of),
    (rf"{_NUMBER} cached experts of (\d+)", _of),
    (rf"slots = {_NUMBER} ?%", _percent),
    (rf"{_NUMBER} ?% of (?:the )?experts", _percent),
    (r"k=(\d+) experts per layer \(of (\d+)\)", _of),
    (r"([\d,]+) slots", _slots),
)
"""What reports write, in the order in which it is looked for."""


def placement(text: str, layers: int, experts: int, cached: bool) -> Placement | None:
    """Return the placement that a text states, None where it states none.

    `cached`: a share without another word is a cache's, not a fixed one.
    """
    low = text.lower()
    for pattern, rule in RULES:
        if found := re.search(pattern, low):
            place = rule(_Said(found, low, layers, experts, cached))
            if place is not PASS:
                return place
    return None
