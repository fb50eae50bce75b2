"""Where a report's experts are: its own words to a placement."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["layers", "share", "cache", "resident", "cpu"]

NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers`: the experts of `on_cpu` layers lie elsewhere; `share`: the same share of every layer
    is on the GPU for good; `cache`: so much of every layer is a cache; `cpu`: no GPU at all.
    """

    kind: Kind
    on_cpu: int = 0
    share: float = 0.0


def placement(text: str, layers: int, experts: int, cached: bool) -> Placement | None:
    """Return the placement that a text states, None where it states none.

    `cached`: a share without another word is a cache's, not a fixed one.
    """
    fixed: Kind = "cache" if cached else "share"
    low = text.lower()
    if re.search(r"no gpu|none used|-ngl 0\b", low):
        return Placement("cpu")
    whole = re.search(r"-ngl (\d+)", low)
    if whole and int(whole[1]) < layers:  # whole layers on the CPU, attention too
        return None
    if re.search(r"all on gpu|all resident|all experts resident", low):
        return Placement("resident")
    found = re.search(r"n-?c(?:pu)?-?moe[ =]*(\d+)", low) or re.search(r"mcl (\d+) of", low)
    found = found or re.search(r"(?:offload )?(\d+) of \d+ layers on cpu", low)
    if found:
        return Placement("layers", on_cpu=min(layers, int(found[1])))
    if re.search(rf"^none\b|cpu-moe|-cmoe|exps=cpu|^0 (?:routed )?experts|^0% of|^0 slots|no cache", low):
        return Placement("layers", on_cpu=layers)
    found = re.search(rf"split {NUMBER} of (\d+)", low)  # of every layer, on the CPU
    if found:
        return Placement("share", share=1 - float(found[1]) / float(found[2]))
    for pattern in (
        rf"{NUMBER} of (\d+) (?:hottest )?(?:slots|experts|expert slots)",
        rf"{NUMBER}/(\d+) experts",
        rf"{NUMBER} cached experts of (\d+)",
    ):
        found = re.search(pattern, low)
        if found:
            moving = "hottest" not in low and "static" not in low and cached
            return Placement("cache" if moving else "share", share=float(found[1]) / float(found[2]))
    found = re.search(rf"slots = {NUMBER} ?%", low) or re.search(rf"{NUMBER} ?% of (?:the )?experts", low)
    if found:
        return Placement(fixed, share=float(found[1]) / 100)
    found = re.search(r"(?:lru )?k=(\d+) experts per layer \(of (\d+)\)", low)
    if found:
        return Placement("cache", share=int(found[1]) / int(found[2]))
    found = re.search(r"([\d,]+) slots(?!/layer| per layer)", low)
    if found and (slots := int(found[1].replace(",", ""))) > experts:  # one pool
        return Placement("cache", share=min(1.0, slots / (experts * layers)))
    found = re.search(r"(\d+) slots(?:/layer| per layer)", low)
    if found:
        kind: Kind = "share" if "static" in low else "cache"
        return Placement(kind, share=min(1.0, int(found[1]) / experts))
    return None
