"""The checkpoint that comes with the package (see `oled/models/tiny/README.md`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oled import paths

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from oled.models.llada2 import LLaDA2MoeModelLM


def tiny_path() -> Path:
    """Return the checkpoint's folder, in a checkout as in an installed wheel."""
    return paths.model_path()


def load_tiny(
    device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[LLaDA2MoeModelLM, PreTrainedTokenizerFast]:
    """Load the bundled model, ready to decode, and its tokenizer.

    The weights are stored in fp16; `dtype` is what they compute in, fp32 by default: half
    precision is many times slower on a CPU and changes one route in a thousand.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    from oled.models.llada2 import LLaDA2MoeModelLM

    model = LLaDA2MoeModelLM.from_pretrained(tiny_path(), dtype=dtype or torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_path())
    return model.to(device).eval(), tokenizer
