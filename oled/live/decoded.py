"""What a live decoding gave, and the simulation of the routing that it made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.hardware import CostTables
from oled.live.foresight import Foresight
from oled.live.link_replay import difference
from oled.live.planlog import LinkLog, PlanLog
from oled.live.store import Preflight
from oled.live.timeline import live_timeline
from oled.policies.composition import Composition
from oled.running.decode import Pass
from oled.sim import metrics
from oled.sim.calibration import Calibration
from oled.sim.lanes import LOG_DENSE
from oled.sim.prepare import Replay, assemble, replay_steps
from oled.sim.settings import Settings
from oled.sim.slots import Budget
from oled.sim.timeline import Timeline, write_events
from oled.trace.steps import Steps
from oled.types import Ints

_RATES = (
    "hit_rate",
    "hit_rate_tokens",
    "accesses",
    "hits",
    "transfers",
    "cpu_executions",
    "dropped",
    "dropped_gate_share",
)


@dataclass(frozen=True, slots=True, eq=False)
class LiveRun:
    """What decoding gave."""

    texts: tuple[str, ...]
    passes: tuple[Pass, ...]
    steps: Steps  # its routing, as the simulator replays it
    plans: PlanLog
    link: LinkLog
    foresight: Foresight  # what a prefetcher saw
    budget: Budget
    costs: CostTables
    forward_ns: NDArray[np.int64]  # [F] wall
    decide_ns: NDArray[np.int64]  # [F] wall, from a layer's ids on
    ask_ns: NDArray[np.int64]  # [F] wall, of router scores and predictions; before the ids
    preflight: Preflight
    surrogate_bytes: int  # on the device, beside the slots
    entries: NDArray[np.int64]  # timeline
    layers: tuple[int, ...]  # absolute ids
    rates: dict[str, float | int | None]  # hit_rate, transfers, ... as in metrics.json

    @property
    def tpot_ns(self) -> float | None:
        rows = {int(request): 1 for request in np.unique(self.steps.request)}
        return metrics.tpot_ns(self.forward_ns, self.steps, rows)

    def summary(self) -> dict[str, Any]:
        """Flat figures; times are wall times of this machine."""
        forwards = len(self.passes)
        return {
            "forwards": forwards,
            "layer_steps": self.steps.num_steps,
            "tokens": int(self.steps.produced.sum()),
            "tpot_ns": self.tpot_ns,
            "decide_ns_per_forward": float(np.median(self.decide_ns)),
            "ask_ns_per_forward": float(np.median(self.ask_ns)),
            "store_bytes": self.preflight.store,
            "device_bytes": self.preflight.device,
            "surrogate_bytes": self.surrogate_bytes,
            **{name: self.rates[name] for name in _RATES},
        }

    def lines(self) -> list[str]:
        """The same in words."""
        found = self.summary()
        tpot = "-" if self.tpot_ns is None else f"{self.tpot_ns / 1e6:.2f} ms"
        asked = found["ask_ns_per_forward"]
        asking = f", asking routers and predictor {asked / 1e3:.0f} us" if asked else ""
        lines = [
            f"{found['tokens']} tokens in {found['forwards']} forwards, TPOT {tpot} (wall, this "
            f"machine); deciding {found['decide_ns_per_forward'] / 1e3:.0f} us a forward{asking}",
            f"hit rate {found['hit_rate'] or 0:.1%}, {found['transfers']} transfers, "
            f"{found['cpu_executions']} on the CPU",
        ]
        if found["dropped"]:
            lines.append(
                f"{found['dropped']} misses given up, {found['dropped_gate_share']:.2%} of the "
                f"gate mass; surrogates {self.surrogate_bytes / 2**20:.1f} MiB beside the slots"
            )
        return lines

    def write_timeline(self, file: Path, name: str, simulated: Replay) -> Path:
        """Both sides in one file that Perfetto opens."""
        there = Timeline.of(simulated.lanes, self.layers, name)
        here = live_timeline(self.entries, self.layers, name)
        return write_events(file, [*there.events(1), *here.events(2)])


def simulate_run(
    run: LiveRun,
    composition: Composition,
    settings: Settings,
    calibration: Calibration | None = None,
) -> tuple[Replay, str | None]:
    """The simulation of the routing that the run made, between dense parts as long as the run's,
    and where its decisions part from the run's.
    """
    steps = run.steps
    dense_ns, head_ns = _outside_experts(run.entries, steps)
    costs = replace(run.costs, head_ns=head_ns, dense_ns=dense_ns)
    asked = replace(settings, plans=True, timeline=(0, steps.num_forwards))
    known = (steps, costs, composition, run.budget, asked, calibration)
    replay = replay_steps(*known)
    simulated = PlanLog(replay.tally.plans, replay.tally.orders)
    ready = assemble(*known)
    parted = difference(run.plans, run.link, steps, simulated, ready, run.foresight.side)
    return replay, parted


def _outside_experts(entries: Ints, steps: Steps) -> tuple[Ints, Ints]:
    """Of each forward, the time before each layer's experts (the median of all but the first
    layer), and what passes before the next one beyond that; i64[F] each, from a live timeline.
    """
    dense = entries[entries[:, 0] == LOG_DENSE]
    lasted = dense[:, 2] - dense[:, 1]
    forwards = range(steps.num_forwards)
    later = [lasted[(dense[:, 3] == f) & (dense[:, 4] > 0)] for f in forwards]
    first = np.array([lasted[(dense[:, 3] == f) & (dense[:, 4] == 0)].sum() for f in forwards])
    each = np.array([np.median(own) if own.size else 0 for own in later]).astype(np.int64)
    after = np.append(np.maximum(first - each, 0)[1:], 0)
    return each, after.astype(np.int64)
