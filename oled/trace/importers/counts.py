"""From how many tokens each expert got to rows of tokens that give the same counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled.types import Bools, Ints


def tokens_of_counts(counts: Ints, top_k: int) -> Ints:
    """Return the fewest tokens of a layer for counts [L, E]: their sum over k, or the largest."""
    return np.asarray(np.maximum(-(-counts.sum(axis=1) // top_k), counts.max(axis=1)))


def rows_of_counts(counts: Ints, top_k: int) -> tuple[NDArray[np.int32], Bools]:
    """Return ids [L, T, k], -1 where unused, and which (layer, token) cells have a row.

    Each expert's tokens are dealt to one token after the other, so that none gets an expert twice.
    Which experts a token has together is made up; the counts are not.
    """
    tokens = tokens_of_counts(counts, top_k)
    ids = np.full((len(counts), int(tokens.max()), top_k), -1, dtype=np.int32)
    experts = np.arange(counts.shape[1], dtype=np.int32)
    for layer, count in enumerate(counts):
        dealt = np.repeat(experts, count)
        slot, token = np.divmod(np.arange(len(dealt)), max(int(tokens[layer]), 1))
        ids[layer, token, slot] = dealt
    return ids, np.arange(ids.shape[1]) < tokens[:, None]
