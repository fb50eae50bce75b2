"""A layer without its routed experts, as transformers would run it, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oled.live.backends.products import DTYPES
from oled.models.catalogue import ModelGeometry
from oled.profiling.bench import Spread

_CPU_COLUMNS = 16_384  # of the logits that are computed on a CPU; the rest is as fast

Timed = Callable[[Callable[[int], Any]], Spread]


class Dense:
    """`timed` measures a job on the device."""

    def __init__(self, device: str, dtype: str, timed: Timed) -> None:
        self._on: dict[str, Any] = {"device": device, "dtype": DTYPES[dtype]}
        self._timed = timed

    def _random(self, *shape: int) -> Tensor:
        numbers: Tensor = torch.randn(*shape, **self._on) * max(1, shape[-1]) ** -0.5
        return numbers

    @torch.inference_mode()
    def layer(self, model: ModelGeometry, tokens: int, context: int) -> Spread:
        """Norms, attention of `tokens` over `context` cached tokens and themselves, router and its
        top-k, shared experts.
        """
        hidden, size = model.hidden_size, model.head_dim
        heads, kv_heads, shared = (
            model.num_heads,
            model.num_kv_heads,
            model.shared_intermediate_size,
        )
        x, norm = self._random(tokens, hidden), self._random(hidden)
        project = self._random((heads + 2 * kv_heads) * size, hidden)
        back, route = self._random(hidden, heads * size), self._random(model.num_experts, hidden)
        cache = self._random(2, 1, kv_heads, context + tokens, size)
        up, down = self._random(2 * shared, hidden), self._random(hidden, shared)

        def layer(_: int) -> Tensor:
            y = F.rms_norm(x, (hidden,), norm)
            states = (
                F.linear(y, project).view(1, tokens, heads + 2 * kv_heads, size).transpose(1, 2)
            )
            query, key, value = torch.split(states, [heads, kv_heads, kv_heads], dim=1)
            cache[0, :, :, context:] = key
            cache[1, :, :, context:] = value
            mixed = F.scaled_dot_product_attention(query, cache[0], cache[1], enable_gqa=True)
            y = x + F.linear(mixed.transpose(1, 2).reshape(tokens, heads * size), back)
            z = F.rms_norm(y, (hidden,), norm)
            weights, _ids = torch.topk(torch.sigmoid(F.linear(z, route).float()), model.top_k)
            if shared:
                gate, upward = F.linear(z, up).chunk(2, dim=-1)
                y = y + F.linear(F.silu(gate) * upward, down)
            return y + weights.sum().to(y.dtype)

        return self._timed(layer)

    @torch.inference_mode()
    def head(self, model: ModelGeometry, tokens: int) -> Spread:
        """Logits; on a CPU of a part of the vocabulary, and scaled."""
        columns = model.vocab_size
        if self._on["device"] == "cpu":
            columns = min(columns, _CPU_COLUMNS)
        x, weights = (
            self._random(tokens, model.hidden_size),
            self._random(columns, model.hidden_size),
        )
        found = self._timed(lambda _: F.linear(x, weights))
        return found.scaled(model.vocab_size / columns)

    @torch.inference_mode()
    def elementwise(self) -> Spread:
        """One of a row of small kernels."""
        x, kernels = self._random(16, 128), 16

        def row(_: int) -> None:
            for _kernel in range(kernels):
                x.mul_(1.0)

        return self._timed(row).scaled(1 / kernels)
