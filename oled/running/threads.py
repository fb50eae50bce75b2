"""The number of threads that a model computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

SMALL_MODEL = 50_000_000  # parameters


@contextmanager
def threads_for(model: PreTrainedModel) -> Iterator[None]:
    """Compute a small model with one thread inside the context: more only wait for each other.

    On two cores that others use, too, the bundled model took ten times longer with two threads.
    """
    before = torch.get_num_threads()
    if model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
