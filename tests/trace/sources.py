"""Files as other tools write them, in their exact layout, made by the tests that read them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

FACTS = {"experts": 8, "expert_bytes": 1000}

# --- SGLang's recorder: 4 layers, 0 dense; 8 logical experts on 10 physical ones ----------------

LAYERS, EXPERTS, PHYSICAL, WIDTH = 4, 8, 10, 8
MAP = np.tile(np.array([0, 1, 2, 3, 4, 5, 6, 7, 3, 0]), (LAYERS, 1))
"""Physical experts 8 and 9 are copies of logical 3 and 0."""


def physical_ids(rng: np.random.Generator, tokens: int, top_k: int) -> np.ndarray[Any, Any]:
    """Ids [layers, tokens, 8]: -1 in layer 0, in columns beyond k; replicas used at random."""
    ids = np.full((LAYERS, tokens, WIDTH), -1, dtype=np.int32)
    for layer in range(1, LAYERS):
        for token in range(tokens):
            logical = rng.permutation(EXPERTS)[:top_k]
            twin = rng.random(top_k) < 0.5
            chosen = np.where((logical == 3) & twin, 8, logical)
            ids[layer, token, :top_k] = np.where((logical == 0) & twin, 9, chosen)
    return ids


def logical(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(ids < 0, -1, MAP[0][np.maximum(ids, 0)])


def token_record(
    number: int, rank: int, ids: np.ndarray[Any, Any], positions: list[int], mode: int
) -> dict[str, Any]:
    """One record of `per_token`, with all keys of the recorder."""
    tokens = len(positions)
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": [100 + place for place in range(tokens)],
        "positions": positions,
        "extend_seq_lens": [tokens] if mode == 1 else None,
        "forward_mode": mode,
        "topk_ids_of_layer": torch.from_numpy(ids),
        "misc_objects": [],
    }


def count_record(number: int, rank: int, ids: np.ndarray[Any, Any]) -> dict[str, Any]:
    """One record of `per_pass`: tokens of each physical expert."""
    counts = np.stack([np.bincount(layer[layer >= 0], minlength=PHYSICAL) for layer in ids])
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.from_numpy(counts.astype(np.int32)),
    }


def save_dump(folder: Path, rank: int, records: list[dict[str, Any]], time: str = "1.5") -> Path:
    """A rank's file."""
    folder.mkdir(exist_ok=True)
    file = folder / f"expert_distribution_recorder_{time}_{rank}.pt"
    data = {"records": records, "last_physical_to_logical_map": torch.from_numpy(MAP)}
    torch.save(data, file)
    return file


def save_stat(file: Path, counts: np.ndarray[Any, Any]) -> Path:
    """What rank 0 writes in `stat` mode: logical counts [passes, layers, E]."""
    data = {
        "rank": 0,
        "logical_count": torch.from_numpy(counts.astype(np.int32)),
        "average_utilization_rate_over_window": None,
    }
    torch.save(data, file)
    return file


# --- arrays of routed experts ---------------------------------------------------------------------


def routed(
    rng: np.random.Generator, tokens: int, *, layers: int = 4, top_k: int = 2, dense: int = 1
) -> np.ndarray[Any, Any]:
    """Ids int32 [tokens, layers, k]; the first layers are dense: zeros."""
    ids = np.zeros((tokens, layers, top_k), dtype=np.int32)
    order = np.argsort(rng.random((tokens, layers - dense, EXPERTS)), axis=2)
    ids[:, dense:] = order[:, :, :top_k]
    return ids


def token_arrays(**changes: Any) -> dict[str, Any]:
    """Two requests of 3 + 2 and 1 + 2 tokens in layers 1 and 3; None leaves an array out."""
    rng = np.random.default_rng(0)
    share = rng.random((8, 2, 1)).astype(np.float32) / 2
    arrays = {
        "ids": routed(rng, 8, layers=2, dense=0).astype(np.int16),
        "start": np.array([0, 5, 8]),
        "layers": np.array([1, 3], dtype=np.int16),
        "n_experts": np.int64(EXPERTS),
        "phase": np.array([0, 0, 0, 1, 1, 0, 1, 1], dtype=np.uint8),
        "w": np.concatenate([1 - share, share], axis=2),
        "meta": np.array(json.dumps({"model": "toy", "prompts": [{}, {}]})),
        **changes,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def sglang_response(ids: np.ndarray[Any, Any], prompt: int) -> dict[str, Any]:
    """A response of /generate with return_routed_experts."""
    return {
        "text": "…",
        "meta_info": {
            "id": "r1",
            "prompt_tokens": prompt,
            "completion_tokens": len(ids) + 1 - prompt,
            "routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
        },
    }


def npy_base64(ids: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def vllm_response(prompt: Any, *choices: Any, **more: Any) -> dict[str, Any]:
    """A completion of vLLM 0.21."""
    return {
        "object": "text_completion",
        "prompt_routed_experts": prompt,
        "choices": [{"index": i, "routed_experts": c} for i, c in enumerate(choices)],
        **more,
    }


def write_json(file: Path, value: Any) -> Path:
    file.write_text(json.dumps(value))
    return file


def write_lines(file: Path, values: list[Any]) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def save_safetensors(file: Path, tensors: dict[str, np.ndarray[Any, Any]], kind: str) -> Path:
    """The format by hand: length, header, bytes."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        end = len(data) + tensor.nbytes
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), end],
        }
        data += tensor.tobytes()
    text = json.dumps({"__metadata__": {"by": "test"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file
