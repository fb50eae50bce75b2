"""Stored widths of weights: bytes of one weight by the name of its format, scales included.

Block formats hold a scale (and a minimum) for every so many weights; a mixture such as q4_k_m is
counted by what a published checkpoint stores. Whatever the width, weights are read at the
profile's rate in bytes (`moe_eff`, `cpu_expert_*`) and computed at its bf16 rate, since they are
widened on the way. Kernels that reach less with a format are not modelled; the result is labelled
*extrapolated*.
"""

from __future__ import annotations

from oled.errors import UserError, nearest

BF16 = 2.0
WEIGHT_BYTES = {
    "fp32": 4.0,
    "bf16": BF16,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "q8_0": 34 / 32,  # 32 bytes and a 16-bit scale for 32 weights
    "q6_k": 210 / 256,
    "q5_k": 176 / 256,
    "q4_k_m": 17_553_162_240 / 28_991_029_248,  # experts of the published Qwen3-30B-A3B, 0.6055
    "q4_k": 144 / 256,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
    "nvfp4": 9 / 16,  # 16 values of 4 bits and an 8-bit scale
    "iq4_xs": 136 / 256,
    "mxfp4": 17 / 32,  # 32 values of 4 bits and an 8-bit scale
    "iq3_xxs": 98 / 256,
    "q2_k": 84 / 256,
}


def weight_bytes(quant: str) -> float:
    """Return the bytes of one weight in the format `quant`.

    Raises: UserError for a format that is not known.
    """
    if quant not in WEIGHT_BYTES:
        raise UserError(f"no weight format '{quant}': {nearest(quant, WEIGHT_BYTES)}")
    return WEIGHT_BYTES[quant]
