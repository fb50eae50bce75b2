"""Which retention keeps the right experts of the small model, and is it the confidence?

Hit rates over whole requests (prefill included), with 95 % intervals by bootstrap over requests;
differences are paired: the same requests are drawn for both. Two controls give each forward's
masked tokens one another's confidences, `shuffled` at random, `reversed` the highest to the least
confident: what a policy gains with these is no information in the confidence, only its level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import oled
from oled.sim import tally
from oled.trace.reader import load
from oled.trace.schema import TokenState
from oled.trace.stats import Estimate
from oled.trace.tables import Trace

SHARES = (0.15, 0.25, 0.40)
SAMPLES = 1000
GATE = "gate"
CONFIDENCE = "confidence × gate"
STATE_GATE = "state-weighted gate, masked 0.1"


def _retention(kind: str, **values: Any) -> dict[str, Any]:
    module, _, name = kind.rpartition(".")
    return {"_target_": f"oled.policies.retention.{module}.{name}", **values}


def _competing(name: str, retention: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": name, "source": "ours", "retention": dict(retention),
            "admission": "compete"}  # fmt: skip


PRIORITY, STATE = "priority.Priority", "state_gate.StateGate"
POLICIES: dict[str, str | dict[str, Any]] = {
    "LRU, one by one": "naive_lru",
    "LRU, atomic": "inter_iteration",
    "LFU": _competing("lfu", _retention("lfu.Lfu")),
    GATE: "gate_sum",
    "gate, smoothing 0.5": _competing("gate5", _retention("gate_sum.GateSum", smoothing=0.5)),
    "state-weighted gate, masked 0.3": _competing("s3", _retention(STATE, masked=0.3)),
    STATE_GATE: "state_gate",
    "state-weighted gate, masked 0.03": _competing("s03", _retention(STATE, masked=0.03)),
    CONFIDENCE: "oled_priority",
    "confidence × gate, smoothing 0.5": _competing("c5", _retention(PRIORITY, smoothing=0.5)),
    "confidence × gate, all from logits": _competing(
        "logits", _retention(PRIORITY, opened_from_logits=True)
    ),
    "Belady with bypass": "oracle",
}
CONTROLS = ("shuffled", "reversed")


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Hits of each policy on the same requests at one cache size."""

    share: float
    hits: dict[str, NDArray[np.float64]]  # [requests]
    accesses: NDArray[np.float64]

    def rate(self, policy: str) -> Estimate:
        return _estimate(self.hits[policy], self.accesses)

    def over(self, policy: str, other: str = GATE) -> Estimate:
        """Points of hit rate above another policy, paired."""
        return _estimate(100 * (self.hits[policy] - self.hits[other]), self.accesses)


def _estimate(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> Estimate:
    requests = len(denominator)
    drawn = np.random.default_rng(0).integers(requests, size=(SAMPLES, requests))
    means = numerator[drawn].sum(1) / denominator[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(numerator.sum() / denominator.sum(), float(low), float(high))


def exchanged(trace: Trace, how: str, seed: int = 0) -> Trace:
    """The same trace, confidences exchanged among the masked tokens of each forward."""
    tokens = trace.tokens
    masked = np.flatnonzero(tokens.state == TokenState.MASKED)
    forward = np.repeat(np.arange(trace.num_forwards), trace.forwards.tokens)[masked]
    known = tokens.confidence[masked]
    if how == "reversed":
        taker, giver = np.lexsort((known, forward)), np.lexsort((-known, forward))
    else:
        draws = np.random.default_rng(seed).random(len(masked))
        taker, giver = np.arange(len(masked)), np.lexsort((draws, forward))
    confidence = tokens.confidence.copy()
    confidence[masked[taker]] = known[giver]
    return replace(trace, tokens=replace(tokens, confidence=confidence))


def rank(path: Path, policies: Iterable[str] = POLICIES) -> list[Ranking]:
    """Replay a trace under all policies at all cache sizes."""
    trace = load(path)
    runs = [(name, trace, POLICIES[name]) for name in policies]
    for how in CONTROLS:
        runs.append((f"{CONFIDENCE}, {how}", exchanged(trace, how), "oled_priority"))
    found = []
    for share in SHARES:
        hits = {}
        for name, subject, policy in runs:
            result = oled.simulate(subject, policy, slots=share, staging="unbounded")
            counts = result.replay.tally.by_phase.sum(axis=1).astype(np.float64)
            hits[name] = counts[:, tally.HITS]
            accesses = counts[:, tally.ACCESSES]
        found.append(Ranking(share, hits, accesses))
    return found


def rows(rankings: list[Ranking]) -> Iterable[tuple[str, ...]]:
    """Policy, then at each size the hit rate with its interval and the points over the gate."""
    for name in rankings[0].hits:
        cells = []
        for ranking in rankings:
            gain = ranking.over(name)
            cells.append(f"{ranking.rate(name)}")
            cells.append("–" if name == GATE else _points(gain))
        yield (name, *cells)


def contrasts(rankings: list[Ranking]) -> Iterable[tuple[str, ...]]:
    """Points of confidence × gate over its controls, at each size."""
    for other in (*(f"{CONFIDENCE}, {how}" for how in CONTROLS), STATE_GATE):
        yield (f"over {other}", *(_points(r.over(CONFIDENCE, other)) for r in rankings))


def _points(gain: Estimate) -> str:
    return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"
