"""How local the bundled model's routing is, beside an untrained control, for its card.

Three recordings of the same held-out problems: the model writes (free), the reference answer is
written at the positions the model chooses, two a forward (forced), and the same with the weights
that training began with (untrained). `oled.trace.stats` defines and measures everything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from train_tiny import Recipe, initial_model

from oled.models.bundled import load_tiny
from oled.record import BlockDiffusion, LoadedModel, Mode, Prompt, record
from oled.trace.stats import Locality, Overlap, stats

FREE = BlockDiffusion(block_length=16, threshold=0.9, max_new_tokens=128)
FORCED = BlockDiffusion(block_length=16, tokens_per_forward=2, mode=Mode.FORCED, max_new_tokens=128)
PAPER_ADJACENT, PAPER_BOUNDARY, PAPER_TIMES = ".85–.90", "> .65", "about 8"
"""OLED-MoE (arXiv 2609.33385), as reported; which of the overlaps it means is not public."""

STATES = ("masked_to_masked", "masked_to_decoded", "decoded_to_decoded")

Found = dict[str, Locality]
Row = Sequence[object]


def measure(prompts: Sequence[Prompt]) -> Found:
    """Locality of the recordings, by name."""
    model, tokenizer = load_tiny()
    trained = LoadedModel("tiny", model, tokenizer, torch.float16)
    control = LoadedModel("untrained", initial_model(Recipe()).eval(), tokenizer, torch.float32)
    runs = {
        "free": (trained, FREE),
        "forced": (trained, FORCED),
        "untrained, forced": (control, FORCED),
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (loaded, settings) in runs.items():
            path = Path(folder) / name
            record(loaded, prompts, settings, path)
            found[name] = stats(path)
    return found


def overlap_rows(found: Found) -> Iterable[Row]:
    """Overlaps with their chance levels; free, forced, untrained, paper."""

    def of_old(overlap: Overlap | None) -> str:
        if overlap is None:
            return "–"
        return f"{overlap.of_old.value:.3f} ({overlap.chance_of_old:.3f})"

    def of_new(overlap: Overlap | None) -> str:
        if overlap is None:
            return "–"
        return f"{overlap.of_new.value:.3f} ({overlap.chance_of_new:.3f})"

    def row(name: str, paper: str, cell: Callable[[Locality], str]) -> Row:
        return (name, *(cell(one) for one in found.values()), paper)

    yield row("neighbours, of the older set", PAPER_ADJACENT, lambda x: of_old(x.overlap.get(1)))
    yield row("neighbours, of the newer set", PAPER_ADJACENT, lambda x: of_new(x.overlap.get(1)))
    yield row("neighbours, Jaccard", "–", lambda x: f"{x.overlap[1].jaccard.value:.3f}")
    for gap in (2, 3, 5, 7):
        yield row(
            f"gap {gap}, of the older set", "falling", lambda x, g=gap: of_old(x.overlap.get(g))
        )
    for name, side in (("last denoising", "after_denoise"), ("commit", "after_commit")):
        for part, cell in (("older", of_old), ("newer", of_new)):
            yield row(
                f"boundary from {name}, of the {part} set",
                PAPER_BOUNDARY,
                lambda x, s=side, c=cell: c(getattr(x.boundary, s)),
            )
    yield row("active share of the experts", "–", lambda x: f"{x.active.share.value:.3f}")
    yield row("active, times one token's", PAPER_TIMES, lambda x: f"{x.active.times_one_token:.1f}")
    yield row("active in a commit", "–", lambda x: f"{x.active.by_phase['commit']:.1f}")
    yield row("denoising forwards a block", "–", lambda x: f"{x.forwards_per_block.value:.1f}")
    yield row("experts without a token", "–", lambda x: f"{sum(x.popularity.dead)}")


def state_rows(found: Found) -> Iterable[Row]:
    """Share of a token's experts kept in the next forward, by what happened to the token."""
    for transition in STATES:
        cells = []
        for one in found.values():
            share = one.persistence.by_transition.get(transition)
            count = one.persistence.tokens_by_transition.get(transition)
            rank = one.persistence.spearman.get(transition)
            rank_text = "–" if rank is None else f"{rank:+.2f}"
            cells.append("–" if share is None else f"{share:.3f} ({count}; ρ {rank_text})")
        yield (transition.replace("_to_", " → "), *cells)
    ranks = [one.persistence.spearman["all"] for one in found.values()]
    yield (
        "all",
        *(
            f"{one.persistence.mean:.3f} (ρ {rank:+.2f})" if rank is not None else "–"
            for one, rank in zip(found.values(), ranks, strict=True)
        ),
    )


def confidence_rows(found: Locality) -> Iterable[Row]:
    """Persistence by confidence, over all tokens and within each transition."""
    kept = found.persistence
    cells = {
        (cell.transition, cell.confidence_low, cell.confidence_high): cell
        for cell in (*kept.by_confidence, *kept.by_confidence_and_transition)
    }
    for low, high in sorted({key[1:] for key in cells}):
        here = [cells.get((transition, low, high)) for transition in ("all", *STATES)]
        shares = ["–" if one is None else f"{one.persistence:.3f} ({one.tokens})" for one in here]
        yield (f"{low:g}–{high:g}", *shares)
