"""Routing facts of a model's configuration: the meaning of weights and scores.

One line a family. A family that is not listed is recorded too; its weights then claim no sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedConfig

from oled.errors import UserError
from oled.trace.schema import WeightKind


class Scoring(StrEnum):
    """The function from a router's first output to the score of each expert."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    PROBABILITIES = "probabilities"  # the router returns them itself


@dataclass(frozen=True, slots=True)
class _Rule:
    scoring: Scoring | None
    normalised: bool | str = "norm_topk_prob"  # or the configuration key that says so
    scale: str | None = None  # the configuration key of a factor on all weights
    over_selected: bool = False  # the softmax runs over the selected experts alone
    # the key of the width of what runs beside the experts for every token, where it is a single MLP
    shared_width: str = "shared_expert_intermediate_size"


_SIGMOID = _Rule(Scoring.SIGMOID, scale="routed_scaling_factor")
_SOFTMAX = _Rule(Scoring.SOFTMAX)
_UNKNOWN = _Rule(None, normalised=False)
_RULES = {
    "deepseek_v2": _Rule(Scoring.SOFTMAX, normalised=False),  # its code never reads norm_topk_prob
    "deepseek_v3": _SIGMOID,
    # normalised first, then multiplied by a learned scale of each expert
    "diffusion_gemma_text": _Rule(
        Scoring.PROBABILITIES, normalised=False, shared_width="intermediate_size"
    ),
    "glm4_moe": _SIGMOID,
    "gpt_oss": _Rule(Scoring.SOFTMAX, over_selected=True),
    "llada2_moe": _SIGMOID,
    "mixtral": _Rule(Scoring.SOFTMAX, normalised=True),
    "olmoe": _SOFTMAX,
    "qwen2_moe": _SOFTMAX,
    "qwen3_moe": _SOFTMAX,
    "sdar_moe": _SOFTMAX,
}
_TOP_K = (
    "num_experts_per_tok",
    "top_k_experts",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
)
_OWN_CACHE = ("minimax",)  # MiniMax-Text-01 refuses every cache that is not its own
_SHARED = ("n_shared_experts", "num_shared_experts")


@dataclass(frozen=True, slots=True)
class Family:
    """The routing of a model as its configuration tells it."""

    model_type: str
    top_k: int
    weight_kind: WeightKind
    weight_sum: float | None  # of SCALED_SUM
    scoring: Scoring | None  # None: the family is not listed
    shared_experts: int  # in units of a routed expert

    @property
    def expected_sum(self) -> float | None:
        """Return the sum of a token's weights; None where any sum is right."""
        if self.weight_kind in (WeightKind.SUM_ONE, WeightKind.SOFTMAX_SELECTED):
            return 1.0
        return self.weight_sum


def read_family(config: PreTrainedConfig) -> Family:
    """Read the text part of a configuration.

    Raises UserError where it names no single top-k, and for models that the decoding loops can not
    run.
    """
    facts = config.get_text_config().to_dict()
    model_type = facts["model_type"]
    if model_type in _OWN_CACHE:
        raise UserError(
            f"'{model_type}' keeps a cache of its own, which the decoding loops do not know: it "
            f"can not be recorded"
        )
    top_k = _top_k(model_type, facts)
    rule = _RULES.get(model_type, _UNKNOWN)
    kind, total = _weights(rule, facts)
    shared = _shared_experts(rule, facts)
    return Family(model_type, top_k, kind, total, rule.scoring, shared)


def _top_k(model_type: str, facts: dict[str, Any]) -> int:
    """Return the experts a token; some families list them by layer."""
    key = next((key for key in _TOP_K if facts.get(key)), None)
    if key is None:
        raise UserError(f"the configuration of '{model_type}' lacks {' or '.join(_TOP_K)}")
    values = facts[key] if isinstance(facts[key], list) else [facts[key]]
    if len(set(values)) > 1:
        raise UserError(
            f"'{model_type}' has another {key} in some layers: {values}; a trace has one"
        )
    return int(values[0])


def _weights(rule: _Rule, facts: dict[str, Any]) -> tuple[WeightKind, float | None]:
    if rule.over_selected:
        return WeightKind.SOFTMAX_SELECTED, None
    normalised = facts[rule.normalised] if isinstance(rule.normalised, str) else rule.normalised
    if not normalised:
        return WeightKind.UNNORMALISED, None
    scale = 1.0 if rule.scale is None else float(facts[rule.scale])
    return (WeightKind.SUM_ONE, None) if scale == 1.0 else (WeightKind.SCALED_SUM, scale)


def _shared_experts(rule: _Rule, facts: dict[str, Any]) -> int:
    width: int = facts.get(rule.shared_width, 0)
    if width:
        return width // int(facts["moe_intermediate_size"])
    return int(next((facts[key] for key in _SHARED if facts.get(key)), 0))
