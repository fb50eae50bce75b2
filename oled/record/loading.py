"""Models to record: the bundled one, a folder, or a name on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from oled import models, paths
from oled.errors import UserError, nearest
from oled.record.modules import moe_layers

BUNDLED = "tiny"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    """A model ready to decode. `stored_dtype` is the checkpoint's, whatever it computes in."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored_dtype: torch.dtype


def load_model(
    name_or_path: str,
    device: str = "auto",
    dtype: str = "auto",
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> LoadedModel:
    """Load a mixture-of-experts model; anything else is refused before its weights are read.

    `dtype` "auto" is fp32 on a CPU, where half precision is many times slower, and the
    checkpoint's own elsewhere.
    """
    models.register()
    source = str(paths.model_path()) if name_or_path == BUNDLED else name_or_path
    where = {"trust_remote_code": trust_remote_code, "revision": revision}
    place = _device(device)
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, **where)
        _refuse_dense(name_or_path, config, trust_remote_code)
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=_dtype(dtype, place, stored), **where
        )
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model={name_or_path} can not be loaded: {reason}") from error
    name = Path(name_or_path).name if Path(name_or_path).exists() else name_or_path
    return LoadedModel(name, model.to(place).eval(), tokenizer, stored)


def _refuse_dense(name: str, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Build the model without memory for its weights and look for experts."""
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if not moe_layers(hollow):
        raise UserError(
            f"model={name} ({config.model_type}) is no mixture of experts that transformers "
            f"stores fused: there is nothing to record"
        )


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"model.device={device}: there is no CUDA device here")
    try:
        return torch.device(device)
    except RuntimeError:
        raise UserError(f"model.device={device}: use auto, cpu or cuda") from None


def _dtype(dtype: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if dtype not in _DTYPES:
        raise UserError(f"model.dtype={dtype} is unknown; {nearest(dtype, ('auto', *_DTYPES))}")
    return _DTYPES[dtype]
