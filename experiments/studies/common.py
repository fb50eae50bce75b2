"""What the studies share: systems, machines, traces. Chosen once; no figure has its own."""

from __future__ import annotations

from typing import Any

SYSTEMS = [
    "naive_lru",
    "mixtral_offloading",
    "moe_infinity",
    "finemoe",
    "fiddler",
    "ktransformers",
    "hybrimoe",
    "dali",
    "tide",
    "llama_cpp_cache",
]
"""Prior systems, in the order of the figures."""
PAPERS = ["moe_infinity", "fiddler", "ktransformers", "dali"]
"""The paper's baselines, as far as they are named in public."""
ABLATION = ["naive_lru", "inter_iteration", "oled_priority", "oled_layeradapt", "oled"]
RUNTIMES = ["graph_fused", "expert_loop"]

MINI = {"trace.geometry": "llada2_mini", "hardware": "rtx5090_xeon8470q"}
FLASH = {"trace.geometry": "llada2_flash", "hardware": "rtx_pro_6000"}
"""LLaDA2.0-flash at 40 slots does not fit 32 GB; the paper's second machine is not public."""
RECORDED = {
    "trace": "demo",
    "cost.geometry": "llada2_mini",
    "hardware": MINI["hardware"],
}
"""The bundled model's recording with LLaDA2.0-mini's bytes and times."""
SCORES = 64
"""Router scores kept of each token, of 256: what HybriMoE and FineMoE rank by, at a quarter of the
size."""


def synthetic(small: bool, requests: int = 16, **fields: Any) -> dict[str, Any]:
    """Make a synthetic trace the base of a sweep."""
    chosen = {"requests": 2 if small else requests, **fields}
    return {"trace": "synthetic"} | {f"trace.{key}": value for key, value in chosen.items()}


def for_systems(small: bool, requests: int = 4, **fields: Any) -> dict[str, Any]:
    """Add what some systems need: router scores, and next-gate predictions."""
    return synthetic(small, requests, scores=SCORES, horizons=3, **fields)


def halves(slots: list[int]) -> list[int]:
    """Return the same shares of the bundled model's 128 experts."""
    return [number // 2 for number in slots]
