"""The host store: exactly its size, in the model's numbers."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from oled.live.kernels import SILU, ExpertForm
from oled.live.store import NUMBERS, HostStore

FORM = ExpertForm(16, 8, False, False, SILU, 0.0, 0.0)
DTYPES = {name: getattr(torch, name) for name in NUMBERS}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_torchs(name):
    """Rounding included: halves, ties, subnormal and huge values."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20_000, dtype=np.float32) * np.float32(10.0) ** rng.integers(
        -8, 4, 20_000
    )
    values = np.concatenate([values, np.array([0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)])
    values = values.astype(np.float32)
    numbers = NUMBERS[name]
    kept = numbers.of(values)
    theirs = torch.from_numpy(values).to(DTYPES[name])
    assert torch.equal(torch.from_numpy(kept).view(DTYPES[name]), theirs)
    assert np.array_equal(numbers.widened(kept), theirs.float().numpy())


@pytest.mark.parametrize("name", NUMBERS)
def test_the_block_has_exactly_the_experts_size_and_begins_with_a_page(name):
    store = HostStore.random(FORM, np.array([3, 5]), numbers=NUMBERS[name])
    size = torch.tensor([], dtype=DTYPES[name]).element_size()
    assert store.expert_bytes == 3 * 16 * 8 * size
    assert store.block.nbytes == 8 * store.expert_bytes
    assert store.block.ctypes.data % mmap.PAGESIZE == 0
    assert store.block.flags.c_contiguous
    assert store.rows(1).shape == (5, 384)
    assert np.shares_memory(store.rows(1), store.block)


def test_random_experts_differ_in_nearly_every_number_and_are_repeatable():
    store = HostStore.random(FORM, np.array([40]))
    again = HostStore.random(FORM, np.array([40]))
    assert np.array_equal(store.block, again.block)
    assert not np.array_equal(store.block, HostStore.random(FORM, np.array([40]), 1).block)
    for other in range(1, 40):
        assert (store.block[0] == store.block[other]).mean() < 0.01
    assert 0.9 < store.block.std() * 16**0.5 < 1.1
