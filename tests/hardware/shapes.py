"""Geometries and profiles that several hardware tests use."""

from __future__ import annotations

from typing import Any

import numpy as np
import yaml

from oled.hardware import CostTables, Profile, build_costs, load_profile, load_runtime
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.paths import conf_dir
from oled.trace.schema import Geometry

PROFILES = sorted(file.stem for file in (conf_dir() / "hardware").glob("*.yaml"))
RUNTIMES = sorted(file.stem for file in (conf_dir() / "runtime").glob("*.yaml"))
MINI = model_geometry("llada2_mini")
FLASH = model_geometry("llada2_flash")
SDAR = model_geometry("sdar_30b")


def trace_geometry(model: ModelGeometry) -> Geometry:
    """What a trace of this model says about itself."""
    layers = len(model.moe_layers)
    return Geometry(
        moe_layers=model.moe_layers,
        experts_per_layer=(model.num_experts,) * layers,
        top_k=model.top_k,
        expert_bytes=(model.expert_bytes,) * layers,
        num_layers=model.num_layers,
        shared_experts=model.shared_experts,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe_intermediate_size,
        name=model.name,
    )


def costs(
    model: ModelGeometry | Geometry,
    profile: Profile | str = "rtx5090_xeon8470q",
    runtime: str = "graph_fused",
    tokens: int = 16,
    context: int = 768,
    most: int = 64,
    **options: Any,
) -> CostTables:
    """Tables of one forward."""
    geometry = trace_geometry(model) if isinstance(model, ModelGeometry) else model
    machine = load_profile(profile) if isinstance(profile, str) else profile
    forward = np.array([tokens]), np.array([context])
    return build_costs(geometry, *forward, most, machine, load_runtime(runtime), **options)


def profile_data(name: str = "rtx5090_xeon8470q") -> dict[str, Any]:
    """A shipped profile as a mapping that a test may change."""
    data: dict[str, Any] = yaml.safe_load((conf_dir() / "hardware" / f"{name}.yaml").read_text())
    return data


def table(expert_bytes: int, times: Any, *, tokens: list[int], **keys: Any) -> dict[str, Any]:
    """A measured table in the form of a profile."""
    time = {"value": times, "unit": "us", "tag": "measured", "source": "test"}
    return {"expert_bytes": expert_bytes, "tokens": tokens, "time": time, **keys}
