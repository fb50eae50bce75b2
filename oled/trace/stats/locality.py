"""What a trace shows about the locality of its routing.

Definitions. A *chain* is the run of denoising forwards of one block of one request; without
denoising it is the run of decode forwards of one request (of one window, where the source restarts
its context). Gaps count forwards of a chain; prefill and commit forwards are no members.
With an older active set A and a newer one B of the same layer:
`of_new` = |A∩B|/|B|, what of the newer set was active before (what a cache could hit), whose chance
level is |A|/E; `of_old` = |A∩B|/|A|, chance |B|/E; `jaccard` = |A∩B|/|A∪B|; `cosine` of the vectors
of tokens per expert. All are means over pairs.
*Persistence* is the share of a token's experts that are named again for the same position in the
next forward of the block, the commit included; its confidence is that of the older forward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from oled.trace.stats.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two sets compared, over all pairs, layers and requests."""

    pairs: int  # of layer-steps
    of_new: Estimate
    of_old: Estimate
    jaccard: Estimate
    chance_of_new: float
    chance_of_old: float
    cosine: Estimate


@dataclass(frozen=True, slots=True)
class LayerOverlap:
    """The overlap of neighbours by layer, in the order of the geometry; None without pairs."""

    gap: int
    of_new: tuple[float | None, ...]
    of_old: tuple[float | None, ...]
    jaccard: tuple[float | None, ...]
    chance_of_new: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """From a block's last forward to the next block's first; the commit left out, or counted."""

    after_denoise: Overlap | None
    after_commit: Overlap | None


@dataclass(frozen=True, slots=True)
class Active:
    """Distinct experts with a token, in the forwards of the chains."""

    by_layer: tuple[float, ...]  # mean
    share_by_layer: tuple[float, ...]  # of E
    mean: Estimate
    share: Estimate
    times_one_token: float  # mean over the k of a single token
    by_phase: dict[str, float]  # mean in each phase


@dataclass(frozen=True, slots=True)
class Cell:
    """Persistence of the tokens of a confidence bin that made a transition."""

    transition: str
    confidence_low: float
    confidence_high: float
    tokens: int
    persistence: float


@dataclass(frozen=True, slots=True)
class Persistence:
    """Share of a token's experts kept in the next forward."""

    mean: float
    by_transition: dict[str, float]
    tokens_by_transition: dict[str, int]
    by_confidence: tuple[Cell, ...]  # transition "all"
    by_confidence_and_transition: tuple[Cell, ...]
    spearman: dict[str, float | None]  # with confidence: "all" and within each transition
    by_layer: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Popularity:
    """How tokens spread over the experts of each layer, all phases together."""

    sorted_shares: tuple[tuple[float, ...], ...]  # by layer, falling; 1 in sum
    dead: tuple[int, ...]  # experts without a token
    entropy: tuple[float, ...]  # over its maximum ln E


@dataclass(frozen=True, slots=True)
class Locality:
    """All of it. What a trace has no data for is None."""

    path: str
    hash: str
    chain: str  # "denoise" or "decode"
    requests: int
    forwards: int
    layers: tuple[int, ...]  # absolute
    experts: tuple[int, ...]
    top_k: int
    overlap: dict[int, Overlap]  # by gap
    adjacent_by_layer: LayerOverlap | None
    boundary: Boundary | None
    active: Active | None
    forwards_per_block: Estimate | None  # denoising
    tokens_per_forward: Estimate | None  # accepted, denoising
    persistence: Persistence | None
    popularity: Popularity
    drafts: dict[str, float | None] | None  # where tokens were drafted: how that went

    def to_json(self) -> dict[str, Any]:
        """Return nested JSON types, numbers at six digits."""
        data: dict[str, Any] = _plain(self)
        return data


def _plain(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6)
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case tuple() | list():
            return [_plain(item) for item in value]
        case str() | int() | None:
            return value
        case _:
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
