"""Fit of the synthetic process to the published figures of routing: how its numbers came about.

    F=experiments/training/fit_workload.py
    python $F even --show              residuals of the present numbers
    python $F even --journal FILE      fits; goes on where it was stopped
    python $F even --old-set           what asking for more would cost

First the frontier of confidence, which alone decides how many tokens a forward accepts; then the
routing, whose readings are those of `oled stats`. Both by Levenberg-Marquardt over the logarithms
of the parameters, with the same random numbers at every point, on made-up models and requests that
`oled reproduce locality` does not use. Results of policies are no part of it. What it finds is
rounded in `oled/trace/synthetic/process.py`, the two visibilities to one, which the figures do not
tell apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oled.trace.stats import locality
from oled.trace.synthetic import Decoding, Process, Workload, llada2_mini, synthetic_trace
from oled.trace.synthetic.decode import decode
from oled.trace.synthetic.named import PROCESSES
from oled.trace.synthetic.text import Text

Values = NDArray[np.float64]
Readings = dict[str, float]

MODEL_SEEDS = (101, 102, 103)
BLOCKS = (8, 16, 24, 32)
TEXT = 384
"""Tokens of output of the one request of every made-up model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A published figure: nothing is asked inside of low to high, `slack` outside counts as 1."""

    low: float
    high: float
    slack: float

    def miss(self, value: float) -> float:
        """How far outside, with its sign."""
        return min(value - self.low, 0.0) + max(value - self.high, 0.0)


FRONTIER = {  # LLaDA2.0's report: its study of thresholds and block lengths, on mini
    "tokens a forward, block 16": Target(2.44, 2.44, 0.03),
    "tokens a forward, block 32": Target(2.55, 2.55, 0.03),
}
ROUTING = {
    "active, block 8": Target(31.1, 32.3, 0.5),  # dMoE: least and greatest of four tasks
    "active, block 16": Target(47.0, 49.8, 0.75),
    "active, block 24": Target(57.8, 62.2, 1.0),
    "active, block 32": Target(66.5, 71.5, 1.25),
    "overlap, block 16": Target(0.862, 0.885, 0.01),  # OLED: .85 to .90, and some distance
    "boundary of the new set, block 16": Target(0.69, 1.0, 0.03),  # OLED: > .65
    "cosine, block 32": Target(0.984, 0.988, 0.003),  # TIDE: .985
    "cosine five apart, block 32": Target(0.955, 1.0, 0.004),  # TIDE: > .95
    "rank of persistence with confidence, masked": Target(0.1, 1.0, 0.1),  # OLED: rising
    "kept, most confident less least": Target(0.02, 1.0, 0.01),  # the same, of all tokens
}
OLD_SET = {"boundary of the old set, block 16": Target(0.65, 1.0, 0.03)}

FREE = {
    "frontier": ("confidence_base", "confidence_left"),
    "routing": (
        "popularity",
        "visible_first",
        "visible_last",
        "noise",
        "drift_masked",
        "drift_decoded",
        "position",
        "request",
        "block",
        "state",
    ),
}
PRIOR = 0.05
"""Weight of staying at the start, per unit of a logarithm: what no figure asks for stays."""
AT_MOST_ONE = {"drift_masked", "drift_decoded"}

EVEN = {
    "confidence_base": 8.2,
    "confidence_left": 3.5,
    "popularity": 0.78,
    "visible_first": 0.15,
    "visible_last": 0.15,
    "noise": 0.41,
    "drift_masked": 0.33,
    "drift_decoded": 0.02,
    "position": 0.88,
    "request": 0.085,
    "block": 0.25,
    "state": 0.035,
}
UNEVEN = {
    "popularity": 0.945,
    "visible_first": 0.3,
    "visible_last": 0.3,
    "noise": 0.5,
    "drift_masked": 0.235,
    "drift_decoded": 0.033,
    "position": 0.99,
    "request": 0.14,
    "block": 0.22,
    "state": 0.03,
}
START = {"even": EVEN, "uneven": EVEN | UNEVEN}
"""Where wider searches had ended, from several starts. A flatter frontier (7.1, 2.5) fits the
routing as well; with a steeper one (9.4, 4.3) the most confident tokens keep less than the
least."""


def frontier(process: Process) -> Readings:
    """Tokens a forward, of many blocks without any layer; standard error about 0.02.

    That at a lower threshold (3.31 in LLaDA2.0's report) is no target, but a check.
    """
    return {
        "tokens a forward, block 16": tokens_a_forward(process, 16, 0.95),
        "tokens a forward, block 32": tokens_a_forward(process, 32, 0.95),
        "tokens a forward, block 32, threshold .85": tokens_a_forward(process, 32, 0.85),
    }


def tokens_a_forward(
    process: Process, length: int, threshold: float, tokens: int = 24_000
) -> float:
    """Of denoising forwards; the commit is not counted."""
    rng = np.random.default_rng(7)
    text = Text(dataclasses.replace(process, dimensions=1), length, rng)
    blocks, forwards = tokens // length, 0
    for _ in range(blocks):
        forwards += sum(1 for _ in decode(text.next_block(), process, Decoding(threshold), rng)) - 1
    return blocks * length / forwards


def routing(process: Process) -> Readings:
    """Means over the made-up models."""
    by_model = [_of_model(process, seed) for seed in MODEL_SEEDS]
    return {name: float(np.mean([one[name] for one in by_model])) for name in by_model[0]}


def _of_model(process: Process, seed: int) -> Readings:
    return {
        name: value
        for length in BLOCKS
        for name, value in _of_block_length(process, seed, length).items()
    }


def _of_block_length(process: Process, seed: int, length: int) -> Readings:
    workload = Workload(1, prompt_blocks=0, blocks=TEXT // length, block_length=length)
    trace = synthetic_trace(llada2_mini(), workload, process, seed=seed, model_seed=seed)
    seen = locality(trace)
    found: Readings = {}
    if seen.active:
        found["active"] = seen.active.mean.value
        found["least layer"] = min(seen.active.by_layer)
        found["greatest layer"] = max(seen.active.by_layer)
    found["overlap"] = seen.overlap[1].of_new.value
    found["cosine"] = seen.overlap[1].cosine.value
    if length >= 16:  # a shorter block can have no forwards that far apart
        found["cosine five apart"] = seen.overlap[5].cosine.value
    if seen.boundary and seen.boundary.after_denoise:
        found["boundary of the new set"] = seen.boundary.after_denoise.of_new.value
        found["boundary of the old set"] = seen.boundary.after_denoise.of_old.value
    found = {f"{name}, block {length}": value for name, value in found.items()}
    if length == 16 and seen.persistence:
        rank = seen.persistence.spearman
        found["rank of persistence with confidence, masked"] = rank["masked_to_masked"] or 0.0
        found["rank of persistence with confidence, all"] = rank["all"] or 0.0
        bins = seen.persistence.by_confidence
        found["kept, most confident less least"] = bins[-1].persistence - bins[0].persistence
        found |= {f"kept, {name}": kept for name, kept in seen.persistence.by_transition.items()}
    return found


READ: dict[str, Callable[[Process], Readings]] = {"frontier": frontier, "routing": routing}


class Journal:
    """Points that were measured already, a line each: what makes a fit resumable."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known: dict[str, Readings] = dict(map(json.loads, lines))

    def measure(self, stage: str, process: Process) -> Readings:
        point = json.dumps([stage, dataclasses.asdict(process)], sort_keys=True)
        if point not in self._known:
            self._known[point] = READ[stage](process)
            if self._path is not None:
                with self._path.open("a") as file:
                    print(json.dumps([point, self._known[point]]), file=file)
        return self._known[point]


def fit(
    stage: str, start: Process, targets: Mapping[str, Target], journal: Journal, rounds: int
) -> Process:
    """Levenberg-Marquardt with differences of 4 % in each parameter, steps of at most 35 %."""
    names = FREE[stage]
    origin = np.log([getattr(start, name) for name in names])
    prior = PRIOR if stage == "routing" else 0.0

    def process_at(point: Values) -> Process:
        values = dict(zip(names, map(float, np.exp(point)), strict=True))
        values |= {name: min(values[name], 1.0) for name in AT_MOST_ONE & values.keys()}
        return dataclasses.replace(start, **values)

    def residuals(point: Values) -> Values:
        found = journal.measure(stage, process_at(point))
        asked = [target.miss(found[name]) / target.slack for name, target in targets.items()]
        return np.array([*asked, *(prior * (point - origin))])

    point, damping = origin, 0.1
    now = residuals(point)
    for number in range(rounds):
        units = 0.04 * np.eye(len(names))
        slopes = np.stack([(residuals(point + unit) - now) / 0.04 for unit in units], axis=1)
        normal = slopes.T @ slopes
        for _ in range(6):
            damped = normal + damping * np.diag(np.diag(normal) + 1e-6)
            there = point + np.clip(np.linalg.solve(damped, -slopes.T @ now), -0.3, 0.3)
            then = residuals(there)
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            break
        gained = now @ now - then @ then
        point, now, damping = there, then, damping / 3
        print(f"{stage}, round {number + 1}: sum of squares {now @ now:.3f}", flush=True)
        if gained < 0.02:
            break
    return process_at(point)


def show(readings: Readings, targets: Mapping[str, Target]) -> Iterable[str]:
    """A line a reading; those with a target first, with how far they are outside of it."""
    for name, target in targets.items():
        one = target.low == target.high
        asked = f"{target.low:g}" if one else f"{target.low:g} to {target.high:g}"
        miss = target.miss(readings[name])
        yield f"{name:46}{readings[name]:8.3f}   asked {asked:15} residual {miss:+.3f}"
    for name in sorted(readings.keys() - targets.keys()):
        yield f"{name:46}{readings[name]:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("process", choices=PROCESSES)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--old-set", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    asked = {"frontier": FRONTIER, "routing": ROUTING | (OLD_SET if given.old_set else {})}
    process, journal = PROCESSES[given.process], Journal(given.journal)
    if not given.show:
        process = dataclasses.replace(process, **START[given.process])
        for stage, targets in asked.items():
            process = fit(stage, process, targets, journal, given.rounds)
        print({name: round(getattr(process, name), 3) for names in FREE.values() for name in names})
    for stage, targets in asked.items():
        print(*show(journal.measure(stage, process), targets), sep="\n")


if __name__ == "__main__":
    main()
