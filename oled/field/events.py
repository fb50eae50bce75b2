"""Layer-steps made up to stated counts a token: misses, copies, experts on the CPU.

Misses of a layer-step are beta-binomial: over-dispersed, since the tokens of a stretch and the
layers of a model differ in how well they are cached. Between the layer-steps of gpt-oss-120b that
are public (events.csv of the bench: 11, 25 and 44 % of the experts cached) the correlation is
0.13 to 0.16.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled.field.scenario import Counts, Events, Memory

TOKENS = 128
CORRELATION = 0.15
SEED = 15
COPY_NS, HAND_OFF_NS = 40_000.0, 20_000.0  # of `quickest_table`, its author's

Split = Literal["table", "admitted"]
"""How copies in the step are chosen among a layer's misses: by a table from misses to copies, the
same in every layer-step, or each miss for itself, because the cache takes it in."""


def misses(layers: int, top_k: int, per_token: float, rng: np.random.Generator) -> Counts:
    """Return made-up misses, int64[TOKENS, layers], whose sum is the stated one."""
    chances = beta_binomial(top_k, min(1.0, per_token / (layers * top_k)), CORRELATION)
    drawn = rng.choice(top_k + 1, size=(TOKENS, layers), p=chances)
    return _corrected(drawn, per_token, np.zeros_like(drawn), np.full_like(drawn, top_k), rng)


def beta_binomial(n: int, mean: float, correlation: float) -> NDArray[np.float64]:
    """Return the chances of 0 to n of n, float64[n + 1]."""
    if mean <= 0.0 or mean >= 1.0:
        certain = np.zeros(n + 1)
        certain[0 if mean <= 0.0 else n] = 1.0
        return certain
    total = 1 / correlation - 1
    a, b = mean * total, (1 - mean) * total

    def beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    chances = [
        math.comb(n, k) * math.exp(beta(k + a, n - k + b) - beta(a, b)) for k in range(n + 1)
    ]
    shares: NDArray[np.float64] = np.array(chances) / sum(chances)
    return shares


@functools.cache
def fetch_tables(top_k: int) -> NDArray[np.int64]:
    """Return every table from misses to copies that never falls and rises by one at most."""
    tables = [[0]]
    for n in range(1, top_k + 1):
        tables = [[*t, f] for t in tables for f in (t[-1], t[-1] + 1) if f <= n]
    return np.array(tables)


def copies(missing: Counts, per_token: float, split: Split, rng: np.random.Generator) -> Counts:
    """Return how many of the misses are copied in the step, with the stated sum."""
    total = missing.sum() / TOKENS
    if per_token >= 0.999 * total:
        return missing.copy()
    if per_token <= 0:
        return np.zeros_like(missing)
    if split == "admitted":
        chosen = rng.binomial(missing, per_token / total)
    else:
        tables = fetch_tables(int(missing.max()))
        often = np.bincount(missing.ravel(), minlength=tables.shape[1]) / TOKENS
        chosen = tables[np.argmin(np.abs(tables @ often - per_token))][missing]
    return _corrected(chosen, per_token, np.zeros_like(missing), missing, rng)


def quickest_table(memory: Memory, expert_bytes: float, top_k: int) -> NDArray[np.int64]:
    """Return how many of n misses to copy for the shortest layer-step, by n: int64[top_k + 1].

    The bench's own law: copies, CPU and both together at the probed rates, a copied layer's launch
    and a CPU layer's hand-off on top.
    """
    table = np.zeros(top_k + 1, np.int64)
    for n in range(1, top_k + 1):
        f = np.arange(n + 1)
        link = np.where(f > 0, COPY_NS + f * expert_bytes / memory.link, 0.0)
        cpu = np.where(f < n, HAND_OFF_NS + (n - f) * expert_bytes / memory.cpu, 0.0)
        both = np.where((f > 0) & (f < n), n * expert_bytes / memory.both, 0.0)
        table[n] = np.argmin(np.maximum(np.maximum(link, cpu), both))
    return table


def spread(layers: int, per_token: float, most: int, rng: np.random.Generator) -> Counts:
    """Return copies that are independent of one another, with the stated sum."""
    drawn = rng.binomial(most, min(1.0, per_token / (layers * most)), size=(TOKENS, layers))
    return _corrected(drawn, per_token, np.zeros_like(drawn), np.full_like(drawn, most), rng)


def _corrected(
    drawn: Counts, per_token: float, least: Counts, most: Counts, rng: np.random.Generator
) -> Counts:
    """Return `drawn` moved by ones, in random places, until its sum is the stated one."""
    left = round(per_token * TOKENS) - int(drawn.sum())
    flat, step = drawn.ravel().astype(np.int64), 1 if left > 0 else -1
    bound = (most if left > 0 else least).ravel()
    while left:
        free = np.flatnonzero((bound - flat) * step > 0)
        if not free.size:
            break
        chosen = rng.permutation(free)[: abs(left)]
        flat[chosen] += step
        left -= step * chosen.size
    return flat.reshape(drawn.shape)


def stated(
    layers: int,
    top_k: int,
    *,
    missing: float,
    copied: float | NDArray[np.int64] = 0.0,
    background: float = 0.0,
    ahead: float = 0.0,
    split: Split = "table",
) -> Events:
    """Return events with these sums a token; what is copied ahead is no miss.

    `copied` is a sum too, or the table from a layer's misses to its copies. Sums that cannot be are
    cut to what can.
    """
    rng = np.random.default_rng(SEED)
    drawn = misses(layers, top_k, missing, rng)
    fetched = copied[drawn] if isinstance(copied, np.ndarray) else copies(drawn, copied, split, rng)
    early = spread(layers, ahead, top_k, rng)
    coming = np.roll(early.ravel(), 1).reshape(early.shape)
    return Events(
        cpu=drawn - fetched,
        copied=fetched,
        background=spread(layers, background, 2 * top_k, rng),
        ahead=early,
        hits=np.maximum(0, top_k - drawn - coming),
    )


def lru_misses(share: float, curve: tuple[float, float]) -> float:
    """Return the share of requests that miss a per-layer LRU cache of `share` of the experts.

    exp(-a share^b). The curves stand in `parts/models.csv`. Qwen3-30B-A3B (seven sizes),
    gpt-oss-120b (three) and a recording of Qwen3.6-35B-A3B lie on one within 0.03; gpt-oss-20b's
    recording, Qwen3.8-Flash-Next, DeepSeek-V4-Flash and Mixtral each have their own, models of 60
    to 64 experts share one. Other models take that of Qwen3-30B-A3B.
    """
    a, b = curve
    return 0.0 if share >= 1.0 else math.exp(-a * share**b)


def static_layers(layers: int, top_k: int, on_cpu: int) -> Events:
    """Return events of a split by layers: all experts of `on_cpu` layers are the CPU's."""
    cpu = np.zeros((1, layers), np.int64)
    cpu[:, :on_cpu] = top_k
    none = np.zeros_like(cpu)
    return Events(cpu, none, none, none, top_k - cpu)
