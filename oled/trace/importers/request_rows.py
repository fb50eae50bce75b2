"""Requests as arrays [tokens, layers, k], and the forwards that they become.

The prompt's tokens are one forward, or as few as can hold them; every later token is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from oled.trace.importers.records import chunks, plain_record, row_tokens
from oled.trace.manifest import Gap, Kept
from oled.trace.schema import ForwardRecord, Phase
from oled.types import Bools, Floats, Ints

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """One request's tokens, each with a row in one layer at least."""

    ids: Ids  # [T, L, k], -1 for unused slots
    present: Bools  # [T, L]
    positions: Ints  # [T]
    prompt: int | None  # the first so many are the prompt
    token_ids: Ints | None = None  # [T]
    weights: Floats | None = None  # [T, L, k]

    @classmethod
    def of(
        cls,
        ids: Ids,
        present: Bools,
        *,
        prompt: int | None,
        token_ids: Ints | None = None,
        context: int = 0,
        weights: Floats | None = None,
    ) -> Self:
        """Keep the tokens that some layer has rows for; `context` tokens came before the first."""
        kept = np.flatnonzero(present.any(axis=1))
        return cls(
            ids[kept],
            present[kept],
            kept + context,
            None if prompt is None else int((kept < prompt).sum()),
            None if token_ids is None else token_ids[kept],
            None if weights is None else weights[kept],
        )

    def forwards(self) -> Iterator[tuple[Phase, int, int]]:
        """Yield phase and range of tokens of each forward."""
        prompt = self.prompt or 0
        for begin, end in chunks(0, prompt):
            yield Phase.PREFILL, begin, end
        for token in range(prompt, len(self.ids)):
            yield Phase.DECODE, token, token + 1


def gaps_of(requests: Sequence[RequestRows], layers: tuple[int, ...], reason: str) -> Iterator[Gap]:
    """Yield the layers that lack rows of some token, by phase."""
    for phase in (Phase.PREFILL, Phase.DECODE):
        missing = np.zeros(len(layers), dtype=bool)
        for one in requests:
            prompt = one.prompt or 0
            rows = one.present[:prompt] if phase is Phase.PREFILL else one.present[prompt:]
            missing |= ~rows.all(axis=0)
        for place in np.flatnonzero(missing):
            yield Gap(layers[place], phase, Kept.SOME, reason)


def records_of(requests: Sequence[RequestRows], layers: Ints) -> Iterator[ForwardRecord]:
    """Yield the forwards of one request after the other."""
    pass_id = 0
    for request, rows in enumerate(requests):
        for phase, begin, end in rows.forwards():
            here = slice(begin, end)
            ends_prompt = phase is Phase.PREFILL and end == rows.prompt
            accepted = np.zeros(end - begin, dtype=np.uint8)
            accepted[-1] = phase is Phase.DECODE or ends_prompt  # the token chosen after the last
            yield plain_record(
                pass_id,
                phase,
                layers,
                rows.ids[here].swapaxes(0, 1),
                request=request,
                weights=None if rows.weights is None else rows.weights[here].swapaxes(0, 1),
                positions=rows.positions[here],
                token_ids=None if rows.token_ids is None else rows.token_ids[here],
                context=int(rows.positions[begin]),
                accepted=accepted,
                produced=int(phase is Phase.DECODE),
                row_tokens=row_tokens(rows.present[here].T),
            )
            pass_id += 1
