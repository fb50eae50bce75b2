"""What a replay needs beyond what was measured: the labels that its result must carry."""

from __future__ import annotations

from oled.hardware import formulas
from oled.hardware.profile import DTYPE_BYTES, Profile
from oled.hardware.shape import Shapes
from oled.hardware.tables import matching


def extrapolations(
    profile: Profile, shapes: Shapes, keys: int, tokens: int, experts: int
) -> list[str]:
    """Labels with the measured range and what is needed, each once.

    Args: keys, tokens, experts: the most that a forward attends to, routes, and finds in a layer.
    """
    found: list[str] = []
    width = DTYPE_BYTES[profile.dtype]
    for expert in shapes.experts:
        if expert.flops and abs(2 * expert.bytes / (width * expert.flops) - 1) > 0.01:
            found.append(
                f"rates were measured with {profile.dtype}, experts have "
                f"{2 * expert.bytes / expert.flops:.2f} bytes a weight"
            )
        gpu = matching(profile.gpu_tables, expert.bytes, expert.top_k)
        cpu = matching(profile.cpu_tables, expert.bytes, expert.top_k)
        if gpu is not None:
            found += [f"GPU table, {text}" for text in gpu.outside(tokens, experts)]
        elif tokens > formulas.GROUP_TOKENS:
            found.append(_range("GPU groups, tokens", 1, formulas.GROUP_TOKENS, tokens))
        if cpu is not None:
            found += [f"CPU table, {text}" for text in cpu.outside(tokens, 1)]
    if shapes.model is not None:
        if keys > formulas.ATTENTION_KEYS:
            found.append(_range("attention, keys", 1, formulas.ATTENTION_KEYS, keys))
        params = formulas.moe_layer_params(shapes.model)
        low, high = formulas.DENSE_PARAMS
        if not low <= params <= high:
            found.append(_range("dense layers, weights", low, high, params))
    return [f"extrapolated: {text}" for text in dict.fromkeys(found)]


def _range(what: str, low: int, high: int, needed: int) -> str:
    return f"{what}: {low} to {high} were measured, {needed} needed"
