"""The effect of a rule on the routes of a trace, or of a running model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled.altered.reroute.rule import Routed
from oled.trace.schema import NO_EXPERT


@dataclasses.dataclass(frozen=True, slots=True)
class RouteChange:
    """The effect of a rule on the block forwards of a trace: sums over layer-steps and tokens."""

    rule: str
    kept_gate_mass: float | None  # share of the tokens' own gate weight that is still served
    active_ratio: float | None  # distinct experts after, over before
    unfilled_share: float | None  # slots without an expert, for want of recorded scores

    @property
    def label(self) -> str:
        """Return the label that must stand beside every result."""
        text = f"route-changing ({self.rule}): cost only; later hidden states would differ"
        if self.unfilled_share:
            text += f"; {self.unfilled_share:.1%} of slots unfilled: too few scores were recorded"
        return text

    def __str__(self) -> str:
        if self.kept_gate_mass is None or self.active_ratio is None:
            return f"routes changed by {self.rule}: no forward of a block"
        return (
            f"routes changed by {self.rule}: {self.kept_gate_mass:.1%} of the gate weight kept, "
            f"{self.active_ratio:.2f} times the distinct experts"
        )

    def metrics(self) -> dict[str, float | None]:
        """Return flat figures beside the simulator's."""
        return {
            "kept_gate_mass": self.kept_gate_mass,
            "rerouted_active_ratio": self.active_ratio,
            "unfilled_share": self.unfilled_share,
        }


def rule_text(rule: dict[str, Any]) -> str:
    """Return `DesVote(share=0.15)` for what `Reroute.describe` returns."""
    fields = ", ".join(f"{key}={value}" for key, value in rule.items() if key != "rule")
    return f"{rule['rule']}({fields})"


@dataclasses.dataclass(slots=True)
class Sums:
    """Counts while routes are changed."""

    mass: float = 0.0
    kept_mass: float = 0.0
    active_before: int = 0
    active_after: int = 0
    slots: int = 0
    unfilled: int = 0

    def add(self, routed: Routed, ids: NDArray[np.int64]) -> None:
        """Count one layer-step."""
        total = routed.weights.sum(axis=1, keepdims=True)
        share = np.divide(routed.weights, total, out=np.zeros_like(routed.weights), where=total > 0)
        kept = (routed.ids[:, :, None] == ids[:, None, :]).any(axis=2) & (routed.ids != NO_EXPERT)
        self.mass += float(share.sum())
        self.kept_mass += float(share[kept].sum())
        self.active_before += np.unique(routed.ids[routed.real]).size
        self.active_after += np.unique(ids[ids < routed.num_experts]).size
        self.slots += int((routed.ids != NO_EXPERT).sum())
        self.unfilled += int((routed.ids != NO_EXPERT).sum() - (ids != NO_EXPERT).sum())

    def change(self, rule: str) -> RouteChange:
        if not self.slots:
            return RouteChange(rule, None, None, None)
        return RouteChange(
            rule,
            self.kept_mass / self.mass if self.mass else None,
            self.active_after / self.active_before,
            self.unfilled / self.slots,
        )
