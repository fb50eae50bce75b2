"""What a replay needs beyond what was measured: the labels that its result must carry."""

from __future__ import annotations

from oled.hardware import formulas
from oled.hardware.profile import DTYPE_BYTES, Profile
from oled.hardware.shape import ExpertShape, Shapes
from oled.hardware.tables import MeasuredTable, matching


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
        found += _other_shapes(profile.gpu_tables, "GPU", expert, gpu)
        found += _other_shapes(profile.cpu_tables, "CPU", expert, cpu)
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


def _other_shapes(
    tables: tuple[MeasuredTable, ...],
    what: str,
    expert: ExpertShape,
    fitting: MeasuredTable | None,
) -> list[str]:
    """Where a profile has tables, and none of this expert: its formula is of other ones."""
    if not tables or fitting is not None:
        return []
    known = ", ".join(f"{t.expert_bytes:,} bytes{_top(t.top_k)}" for t in tables)
    return [
        f"{what} table: experts of {known} were measured, "
        f"{expert.bytes:,} bytes{_top(expert.top_k)} needed"
    ]


def _top(top_k: int | None) -> str:
    return "" if top_k is None else f" and top-{top_k}"


def foreign(profile: Profile, device: str) -> list[str]:
    """A label where the profile was not measured on `device`, on which it is compared."""
    if profile.device == device:
        return []
    origin = f"was measured on {profile.device}" if profile.device else "was not measured as one"
    return [f"foreign profile: {profile.name} {origin}, this is {device}"]


def _range(what: str, low: int, high: int, needed: int) -> str:
    return f"{what}: {low} to {high} were measured, {needed} needed"
