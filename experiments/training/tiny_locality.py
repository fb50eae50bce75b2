"""How local the bundled model's routing is, for its card: every figure beside its chance level, an
untrained control and what was published.

The same held-out problems are recorded as the model writes (free), along the reference answers,
which are written at the positions that the model chooses, two a forward (forced), and forced with
the weights that training began with (untrained). `oled.trace.stats` defines and measures
everything; intervals are of 95 %, by bootstrap over problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tiny_recipe import Recipe, initial_model

from oled.record import BlockDiffusion, LoadedModel, Mode, Prompt, record
from oled.trace.stats import Estimate, Locality, Overlap, stats

BLOCKS = (8, 16, 32)
FREE = BlockDiffusion(threshold=0.9, max_new_tokens=96)
FORCED = replace(FREE, mode=Mode.FORCED, tokens_per_forward=2)
CONTROL = "untrained"

STATES = ("masked_to_masked", "masked_to_decoded", "decoded_to_decoded")

Found = Mapping[str, Locality]
Row = Sequence[object]


@dataclass(frozen=True, slots=True)
class Published:
    """Figures of LLaDA2.0-mini, at B 8, 16, 32 or whatever B: OLED (arXiv 2609.33385; which overlap
    it means is not public), dMoE (arXiv 2605.30876), the LLaDA2.0 report."""

    adjacent: str = ".85–.90"
    boundary: str = "> .65"
    share: tuple[str, ...] = (".12", ".19", ".28")
    times: tuple[str, ...] = ("4.0", "6.1", "8.7")
    tokens_per_forward: tuple[str, ...] = ("–", "2.44", "2.55")


def name_of(mode: str, block: int) -> str:
    return f"{mode}, B {block}"


def record_all(trained: LoadedModel, prompts: Sequence[Prompt], folder: Path) -> dict[str, Path]:
    """The recordings by name; those that are in the folder already are left as they are."""
    untrained = initial_model(Recipe()).eval()
    control = LoadedModel(CONTROL, untrained, trained.tokenizer, torch.float32)
    runs = {
        name_of(mode, block): (trained, replace(decode, block_length=block))
        for mode, decode in (("free", FREE), ("forced", FORCED))
        for block in BLOCKS
    }
    runs[name_of(CONTROL, 16)] = (control, replace(FORCED, block_length=16))
    paths = {}
    for name, (loaded, settings) in runs.items():
        paths[name] = folder / name.replace(" ", "").replace(",", "-")
        if not paths[name].exists():
            record(loaded, prompts, settings, paths[name])
    return paths


def measure(paths: Mapping[str, Path]) -> dict[str, Locality]:
    """Locality of the recordings, by name."""
    return {name: stats(path) for name, path in paths.items()}


def overlap_rows(found: Found, published: Published) -> Iterable[Row]:
    """For recordings of one mode at the block lengths in order: a value a row, with its chance."""

    def row(name: str, cell: Callable[[Locality], str], known: Sequence[str] | str = "–") -> Row:
        said = [known] * len(BLOCKS) if isinstance(known, str) else known
        texts = ", ".join(dict.fromkeys(said)) if len(set(said)) > 1 else said[0]
        return (name, *(cell(one) for one in found.values()), texts)

    def overlap(name: str, of: Callable[[Locality], Overlap | None], known: str) -> Iterable[Row]:
        for part in ("newer", "older"):
            yield row(f"{name}, of the {part} set", lambda x, p=part: _overlap(of(x), p), known)

    yield from overlap("neighbours", lambda x: x.overlap.get(1), published.adjacent)
    yield row("neighbours, Jaccard", lambda x: f"{x.overlap[1].jaccard}")
    for gap in (3, 5):
        yield row(f"gap {gap}, of the newer set", lambda x, g=gap: _overlap(x.overlap.get(g)))
    yield from overlap(
        "boundary from last denoising", lambda x: x.boundary.after_denoise, published.boundary
    )
    yield from overlap("boundary from commit", lambda x: x.boundary.after_commit, "–")
    yield row("active share of the experts", lambda x: f"{x.active.share}", published.share)
    yield row("active, times one token's", _times, published.times)
    yield row("active in a commit", lambda x: f"{x.active.by_phase['commit']:.1f}")
    yield row("tokens a forward", lambda x: f"{x.tokens_per_forward}", published.tokens_per_forward)


def _overlap(overlap: Overlap | None, part: str = "newer") -> str:
    if overlap is None:
        return "–"
    value, chance = {
        "newer": (overlap.of_new, overlap.chance_of_new),
        "older": (overlap.of_old, overlap.chance_of_old),
    }[part]
    return f"{value} ({chance:.2f})"


def _times(one: Locality) -> str:
    mean = one.active.mean
    return f"{Estimate(*(x and x / one.top_k for x in (mean.value, mean.low, mean.high)))}"


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
    """Persistence by confidence: all tokens, masked ones whatever becomes of them, and within each
    transition."""
    kept = found.persistence
    cells = {
        (cell.transition, cell.confidence_low, cell.confidence_high): (
            cell.tokens * cell.persistence,
            cell.tokens,
        )
        for cell in (*kept.by_confidence, *kept.by_confidence_and_transition)
    }

    def cell(edges: tuple[float, float], *transitions: str) -> str:
        here = [cells.get((name, *edges), (0.0, 0)) for name in transitions]
        kept_tokens, tokens = (sum(part) for part in zip(*here, strict=True))
        return f"{kept_tokens / tokens:.3f} ({tokens})" if tokens else "–"

    for edges in sorted({key[1:] for key in cells}):
        columns = (("all",), STATES[:2], *((state,) for state in STATES))
        yield ("{:g}–{:g}".format(*edges), *(cell(edges, *names) for names in columns))
