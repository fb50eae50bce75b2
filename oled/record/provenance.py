"""The manifest of a recording: what was run, on what, and how."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

import oled
from oled.altered.reroute import Reroute
from oled.altered.reroute.trace import RULE
from oled.running.decode import (
    Autoregressive,
    BlockDiffusion,
    CanvasDiffusion,
    Decoding,
    Speculative,
    SpeculativeAutoregressive,
    SpeculativeBlocks,
)
from oled.running.drafting import DRAFT, Draft
from oled.running.families import Family
from oled.running.loading import LoadedModel
from oled.running.modules import geometry_of
from oled.running.prompts import Prompt
from oled.running.recorder import Recorder
from oled.trace.manifest import Manifest

_DECODING = {
    Autoregressive: "autoregressive",
    BlockDiffusion: "block_diffusion",
    CanvasDiffusion: "canvas_diffusion",
    SpeculativeAutoregressive: "speculative_autoregressive",
    SpeculativeBlocks: "speculative_blocks",
}


def manifest_of(
    loaded: LoadedModel,
    decode: Decoding,
    prompts: Sequence[Prompt],
    recorder: Recorder,
    *,
    batch_size: int,
    chat: bool,
    seed: int,
    rule: Reroute | None,
) -> Manifest:
    """Build the manifest from what is known before the first pass; `decode` has its token ids."""
    family, geometry = recorder.family, geometry_of(loaded.model, loaded.stored_dtype)
    predictors = [predictor.name for predictor in recorder.predictors]
    if isinstance(decode, Speculative):
        units = Draft(loaded.model, decode.draft.experts).units
        geometry, predictors = replace(geometry, draft_experts=units), [DRAFT, *predictors]
    return Manifest(
        geometry=geometry,
        weight_kind=family.weight_kind,
        weight_sum=family.weight_sum,
        confidence_kind=decode.confidence_kind,
        model=_model_facts(loaded, family),
        tokenizer={"id": loaded.name, "vocabulary": len(loaded.tokenizer), "chat": chat},
        decode={"kind": _DECODING[type(decode)], **asdict(decode), "batch_size": batch_size},
        seed=seed,
        prompts=tuple({"hash": prompt.sha256, "source": prompt.source} for prompt in prompts),
        provenance={
            "device": device_name(loaded.model.device),
            "versions": versions(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "next_gate_horizons": recorder.horizons,
            "predictors": predictors,
            "router_scores": recorder.score_width,
            "score_kind": family.scoring,
            RULE: None if rule is None else rule.describe(),
        },
    )


def _model_facts(loaded: LoadedModel, family: Family) -> dict[str, Any]:
    return {
        "id": loaded.name,
        "type": family.model_type,
        "revision": loaded.model.config.to_dict().get("_commit_hash"),
        "dtype": _dtype_name(loaded.model.dtype),
        "stored_dtype": _dtype_name(loaded.stored_dtype),
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"


def versions() -> dict[str, str]:
    """Return the versions of everything that decides the numbers."""
    return {
        "oled": oled.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }


def commit() -> str | None:
    """Return the commit of the checkout that runs, or None in an installed package."""
    root = Path(oled.__file__).parent
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
