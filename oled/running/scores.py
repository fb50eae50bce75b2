"""From what a router returns to the scores of the experts, before and after its bias."""

from __future__ import annotations

from torch import Tensor, nn

from oled.errors import UserError
from oled.running.families import Family, Scoring

_SELECTION_BIAS = ("e_score_correction_bias", "expert_bias")


def router_scores(
    scoring: Scoring | None, router: nn.Module, logits: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The score [N, E] of every expert, and what the router chooses by where that is biased."""
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
            f"how '{family.model_type}' turns router logits into scores is not known: do without"
        )
