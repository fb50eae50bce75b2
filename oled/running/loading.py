"""Models to record: the bundled one, a folder, or a name on the hub."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from oled import models, paths
from oled.errors import UserError, nearest
from oled.running.families import read_family
from oled.running.modules import moe_layers

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
    """Load a mixture-of-experts model. Raises UserError for any other before reading its weights.

    `dtype` "auto" is fp32 on a CPU, where half precision is many times slower, and the
    checkpoint's own elsewhere; "stored" is the checkpoint's own.
    """
    models.register()
    source = str(paths.model_path()) if name_or_path == BUNDLED else name_or_path
    where = {"trust_remote_code": trust_remote_code, "revision": revision}
    target = _device(device)
    with quiet(), _explained(name_or_path):
        config = AutoConfig.from_pretrained(source, **where)
        refuse_unrecordable(name_or_path, config, trust_remote_code)
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        _refuse_made_up(name_or_path, tokenizer)
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=_dtype(dtype, target, stored),
            ignore_mismatched_sizes=True,  # they are refused below
            output_loading_info=True,
            **where,
        )
        _refuse_incomplete(name_or_path, found)
    name = Path(name_or_path).name if Path(name_or_path).exists() else name_or_path
    return LoadedModel(name, model.to(target).eval(), tokenizer, stored)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own reports; what they are about raises UserError instead."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    hub_logging.set_verbosity(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn whatever reading a checkpoint raises into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # foreign files, read by foreign code: anything may come
        text = str(error).strip() or type(error).__name__
        reason = text.splitlines()[0]
        if "trust_remote_code=True" in text:
            reason = "it comes with code of its own; model.trust_remote_code=true lets that run"
        raise UserError(f"model={name} can not be loaded: {reason}") from error


def refuse_unrecordable(name: str, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Raise UserError where a model, built without memory for its weights, can not be recorded."""
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if not moe_layers(hollow):
        raise UserError(
            f"model={name} ({config.model_type}) is not a mixture of experts with fused "
            f"weights in transformers: there is nothing to record"
        )
    read_family(config)


def _refuse_made_up(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for the empty tokenizer that transformers makes up without files."""
    if len(tokenizer) < 2:
        raise UserError(f"model={name} has no tokenizer: put its files beside the weights")


def _refuse_incomplete(name: str, found: Mapping[str, Any]) -> None:
    """Raise UserError for missing weights, which transformers would replace by random numbers."""
    for key, stored, wanted in sorted(found["mismatched_keys"]):
        raise UserError(
            f"model={name}: {key} has the shape {tuple(stored)}, config.json says {tuple(wanted)}"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"model={name}: {len(missing)} weights are not in the checkpoint, such as {missing[0]}"
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
    if dtype == "stored":
        return stored
    if dtype not in _DTYPES:
        raise UserError(f"model.dtype={dtype} is unknown; {nearest(dtype, ('auto', *_DTYPES))}")
    return _DTYPES[dtype]
