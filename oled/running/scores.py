"""Scores of the experts, before and after a router's bias, from the router's output."""

from __future__ import annotations

from torch import Tensor, nn

from oled.errors import UserError
from oled.running.families import Family, Scoring

_SELECTION_BIAS = ("e_score_correction_bias", "expert_bias")


def router_scores(
    scoring: Scoring | None, router: nn.Module, logits: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return every expert's score [N, E], and the biased score where the router chooses by one."""
    match scoring:
        case Scoring.SIGMOID:
            values = logits.float().sigmoid()
        case Scoring.PROBABILITIES:
            values = logits.float()
        case _:
            values = logits.float().softmax(-1)
    buffers = dict(router.named_buffers(recurse=False))
    bias = next((buffers[key] for key in _SELECTION_BIAS if key in buffers), None)
    return values, None if bias is None else values + bias


def refuse_unknown_scores(family: Family) -> None:
    """Raise UserError for a family whose scores are not known."""
    if family.scoring is None:
        raise UserError(
            f"how '{family.model_type}' turns router logits into scores is not known: leave router "
            f"scores out"
        )
