"""A model with the cache of the rows that it decodes together.

Shapes: B rows, n columns of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oled.running.decode.batch import Row
from oled.types import Ints


class CachedRows:
    """The cache, and where each row stands in it: rows are padded on the left."""

    def __init__(self, model: PreTrainedModel, pads: Sequence[int]) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config())
        self.length = 0  # columns in the cache, pads included
        self._pads = torch.tensor(pads, device=model.device)

    def keep_unfinished(self, rows: Sequence[Row]) -> list[Row]:
        """Drop finished rows from the cache; return the others."""
        left = [index for index, row in enumerate(rows) if not row.finished]
        if left and len(left) < len(rows):
            index = torch.tensor(left, device=self._pads.device)
            self._pads = self._pads[index]
            self.cache.batch_select_indices(index)
        return [rows[index] for index in left]

    def own_positions(self, columns: int) -> Tensor:
        """Return positions [B, cached + columns] from each row's first token; pads are negative."""
        every = torch.arange(self.length + columns, device=self._pads.device)
        return every - self._pads[:, None]

    def to_device(self, tokens: Ints) -> Tensor:
        return torch.from_numpy(tokens).to(self._pads.device)


class CachedBatch(CachedRows):
    """A model whose one stack of layers reads and writes the cache.

    Visibility is bidirectional inside a block and causal between blocks; `block_length` 1 is plain
    causal attention, which is left to the model (it may have sliding windows).
    """

    def __init__(self, model: PreTrainedModel, pads: Sequence[int], block_length: int) -> None:
        super().__init__(model, pads)
        self._block_length = block_length

    @torch.inference_mode()
    def run(self, tokens: Ints, *, keep: bool) -> Tensor:
        """Return logits [B, n, V] of tokens [B, n] behind the cache; `keep`: add them to it."""
        logits: Tensor = self.model(**self._inputs(tokens)).logits
        if keep:
            self.length += tokens.shape[1]
        else:
            self.cache.crop(-tokens.shape[1])
        return logits

    @torch.inference_mode()
    def run_states(self, states: Ints) -> Tensor:
        """Return logits [n, L, V] of n states [n, L] of one row's block, by one pass.

        A state sees the cache and itself; nothing is kept.
        """
        number, length = states.shape
        own = self.own_positions(length)[:, self.length :].repeat(1, number)  # [1, n L]
        inputs = self._inputs(states.reshape(1, -1))
        state = torch.arange(number, device=own.device).repeat_interleave(length)
        visible = torch.ones(number * length, self.length, dtype=torch.bool, device=own.device)
        visible = torch.cat((visible, state[:, None] == state), dim=1)[None, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=own.device)
        inputs["attention_mask"] = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
        inputs["position_ids"] = own
        logits: Tensor = self.model(**inputs).logits
        self.cache.crop(-number * length)
        return logits.view(number, length, -1)

    def drop(self, columns: int) -> None:
        """Take the last columns out of the cache again."""
        if columns:
            self.cache.crop(-columns)
            self.length -= columns

    @torch.inference_mode()
    def run_last(self, tokens: Ints) -> Tensor:
        """Return logits [B, V] of the last column; add all columns to the cache."""
        logits: Tensor = self.model(**self._inputs(tokens), logits_to_keep=1).logits
        self.length += tokens.shape[1]
        return logits[:, -1]

    @torch.inference_mode()
    def fill(self, tokens: Ints) -> None:
        """Run tokens [B, n] into the cache without the head, the larger part for a long prompt."""
        self.model.base_model(**self._inputs(tokens))
        self.length += tokens.shape[1]

    def _inputs(self, tokens: Ints) -> dict[str, object]:
        own = self.own_positions(tokens.shape[1])
        return {
            "input_ids": self.to_device(tokens),
            "position_ids": own[:, self.length :].clamp(min=0),
            "attention_mask": self._mask(own),
            "cache": self.cache,
            "use_cache": True,
        }

    def _mask(self, own: Tensor) -> Tensor:
        """Return a mask: 0 and 1 [B, stop] for block length 1, else additive [B, 1, n, stop]."""
        if self._block_length == 1:
            return (own >= 0).long()
        block = own // self._block_length
        visible = (block[:, None, :] <= block[:, self.length :, None]) & (own[:, None, :] >= 0)
        # a pad sees itself: a row of the mask without any visible key would give NaN
        itself = torch.eye(own.shape[1], dtype=torch.bool, device=own.device)
        visible |= itself[self.length :]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=own.device)
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[:, None]


class CachedCanvases(CachedRows):
    """A model whose encoder fills the cache and whose decoder reads it."""

    @torch.inference_mode()
    def encode(self, tokens: Ints) -> None:
        """Run tokens [B, n] through the encoder into the cache."""
        own = self.own_positions(tokens.shape[1])
        self.model.base_model.encoder(
            input_ids=self.to_device(tokens),
            position_ids=own[:, self.length :].clamp(min=0),
            attention_mask=own >= 0,
            cache=self.cache,
        )
        self.length += tokens.shape[1]

    @torch.inference_mode()
    def denoise(self, canvases: Ints, conditioning: Tensor | None) -> Tensor:
        """Return logits [B, C, V] of canvases [B, C] behind the cache, which stays as it is.

        `conditioning` [B, C, V] are the logits of the pass before over the same canvases.
        """
        own = self.own_positions(canvases.shape[1])
        logits: Tensor = self.model(
            decoder_input_ids=self.to_device(canvases),
            decoder_position_ids=own[:, self.length :],
            decoder_attention_mask=own >= 0,
            self_conditioning_logits=None
            if conditioning is None
            else conditioning.to(self.model.dtype),
            cache=self.cache,
        ).logits
        return logits
