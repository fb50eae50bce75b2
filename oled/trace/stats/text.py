"""`Locality` as text."""

from __future__ import annotations

from collections.abc import Iterator

from oled.trace.stats.locality import Locality, Overlap


def locality_lines(found: Locality) -> list[str]:
    """Return a page for the terminal."""
    return list(_lines(found))


def _lines(found: Locality) -> Iterator[str]:
    layers, experts = len(found.layers), sorted(set(found.experts))
    shape = f"{layers} MoE layers, {'/'.join(map(str, experts))} experts, top-{found.top_k}"
    yield f"{found.path}: {found.requests} requests, {found.forwards} forwards, {shape}"
    if found.active is not None:
        active = found.active
        yield (
            f"active experts of a layer ({found.chain}): {active.mean} of {max(experts)}, share "
            f"{active.share}, {active.times_one_token:.1f} times one token's"
        )
        phases = ", ".join(f"{phase} {mean:.1f}" for phase, mean in active.by_phase.items())
        yield f"  by phase: {phases}; by layer: {_list(active.by_layer, '.1f')}"
    if found.forwards_per_block is not None:
        yield (
            f"denoising forwards a block: {found.forwards_per_block}; "
            f"tokens a forward: {found.tokens_per_forward}"
        )
    if found.overlap:
        yield f"overlap of active sets, {found.chain} forwards of one chain (95 % over requests):"
        yield _HEAD
        for gap, overlap in found.overlap.items():
            yield _row(f"gap {gap}", overlap)
    if found.boundary is not None:
        for name, side in (
            ("boundary, from denoise", found.boundary.after_denoise),
            ("boundary, from commit", found.boundary.after_commit),
        ):
            if side is not None:
                yield _row(name, side)
    if found.adjacent_by_layer is not None:
        yield f"  gap 1 of the newer set by layer: {_list(found.adjacent_by_layer.of_new, '.3f')}"
    yield from _persistence(found)
    if found.drafts is not None:
        rates = ", ".join(
            f"{name.replace('_', ' ')} {rate:.3f}"
            for name, rate in found.drafts.items()
            if rate is not None
        )
        yield f"drafts (all else is of plain decoding): {rates}"
    dead = sum(found.popularity.dead)
    yield (
        f"experts without a token: {dead} of {sum(found.experts)}; load entropy over its maximum "
        f"by layer: {_list(found.popularity.entropy, '.3f')}"
    )


_HEAD = (
    f"  {'':24}{'of the newer':26}{'chance':8}{'of the older':26}{'chance':8}{'Jaccard':9}cosine"
)


def _row(name: str, overlap: Overlap) -> str:
    return (
        f"  {name:24}{overlap.of_new!s:26}{overlap.chance_of_new:<8.3f}{overlap.of_old!s:26}"
        f"{overlap.chance_of_old:<8.3f}{overlap.jaccard.value:<9.3f}{overlap.cosine.value:.3f}"
    )


def _persistence(found: Locality) -> Iterator[str]:
    if found.persistence is None:
        return
    kept = found.persistence
    yield f"a token's experts kept in the next forward: {kept.mean:.3f}"
    for name, mean in kept.by_transition.items():
        yield (
            f"  {name.replace('_', ' '):24}{mean:.3f}  ({kept.tokens_by_transition[name]} tokens)"
            f"  rank correlation with confidence {_number(kept.spearman[name])}"
        )
    yield f"  {'all':24}rank correlation with confidence {_number(kept.spearman['all'])}"
    cells = (
        f"{cell.confidence_low:g}-{cell.confidence_high:g}: {cell.persistence:.3f}"
        for cell in kept.by_confidence
    )
    yield f"  by confidence: {', '.join(cells)}"


def _list(values: tuple[float | None, ...], form: str) -> str:
    return " ".join("-" if value is None else format(value, form) for value in values)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:+.3f}"
