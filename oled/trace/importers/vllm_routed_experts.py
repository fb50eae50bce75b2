"""Routed experts of vLLM: integers [tokens, layers, k] (16 or, up to 256 experts, 8 bits).

As NPY (one request), as NPZ (`prompt_routed_experts` and `routed_experts` of one request, or one
request an array), or as JSON responses (one, a list, one a line): `prompt_routed_experts` of the
response and `routed_experts` of each choice, as nested lists, as a base64 NPY file, or as
{data, dtype, shape}. Unused slots and rows that were never written are zero. The first choice
carries the prompt; others start after it, for it was forwarded once. The layer axis holds the MoE
layers or all of them; where no model is named, its places are taken for layer ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oled.trace.errors import TraceError
from oled.trace.fields import JsonFields
from oled.trace.importers.responses import (
    arrays_of,
    decoded_array,
    integers,
    objects_of,
    plain_routes,
)
from oled.trace.importers.routed import LACKS, OPTIONS, Routes, source_of
from oled.trace.importers.source import Format, Source
from oled.trace.options import Options
from oled.types import Array

NAME = "vllm_routed_experts"
PROMPT, GENERATED = "prompt_routed_experts", "routed_experts"


def read(path: Path, options: Options) -> Source:
    """Read one request an array, or a choice of a response."""
    arrays = arrays_of(path)
    if arrays is None:
        requests = [routes for fields in objects_of(path) for routes in _choices(fields)]
    elif arrays.keys() <= {PROMPT, GENERATED}:
        requests = [_joined(path.stem, arrays.get(PROMPT), arrays.get(GENERATED))]
    else:
        requests = plain_routes(arrays)
    return source_of(NAME, path, requests, options)


FORMAT = Format(
    NAME,
    "vLLM's routed experts: ids [tokens, layers, k] (.npy, .npz, .json, .jsonl)",
    read,
    LACKS,
    OPTIONS,
)


def _choices(fields: JsonFields) -> list[Routes]:
    where = fields.where
    prompt = _array(fields, PROMPT)
    said = integers(fields, "prompt_token_ids")
    key = "choices" if "choices" in fields.data else "outputs"
    found = []
    for number, choice in enumerate(fields.items(key, dict)):
        inner = JsonFields(choice, f"{where}: {key}[{number}]")
        generated = _array(inner, GENERATED)
        new = integers(inner, "token_ids")
        if number == 0:
            found.append(_joined(inner.where, prompt, generated, said, new))
        elif generated is not None:
            context = 0 if prompt is None else len(prompt)
            found.append(Routes(inner.where, generated, 0, new, context))
    return found


def _joined(
    where: str,
    prompt: Array | None,
    generated: Array | None,
    said: tuple[int, ...] | None = None,
    new: tuple[int, ...] | None = None,
) -> Routes:
    """Join rows of the prompt and of what was generated into one sequence."""
    tokens = None if said is None or new is None else (*said, *new)
    if prompt is not None and generated is not None and len(generated):
        if prompt.ndim != 3 or prompt.shape[1:] != generated.shape[1:]:
            raise TraceError(
                f"{where}: {PROMPT} {prompt.shape} and {GENERATED} {generated.shape} do not fit"
            )
        ids = np.concatenate([prompt.astype(np.int64), generated.astype(np.int64)])
        return Routes(where, ids, len(prompt), tokens)
    if prompt is not None:
        return Routes(where, prompt, len(prompt), tokens)
    if generated is None:
        raise TraceError(f"{where}: neither {PROMPT} nor {GENERATED}: was the option on?")
    # newer engines put the prompt's rows in front of those of the new tokens
    whole = said is not None and new is not None and len(generated) == len(said) + len(new) - 1
    return Routes(where, generated, len(said) if whole and said else None, tokens if whole else new)


def _array(fields: JsonFields, key: str) -> Array | None:
    value = fields.data.get(key)
    return None if value is None else decoded_array(value, f"{fields.where}: {key}")
