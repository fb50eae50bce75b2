"""Models: shapes without weights (`catalogue`), families of transformers, the bundled checkpoint.

Importing this package or `oled.models.catalogue` loads no torch. `register()` makes
`AutoModelForCausalLM` know LLaDA2, SDAR and DiffusionGemma.
"""

from __future__ import annotations

from importlib import import_module

_FAMILIES = ("llada2", "sdar", "diffusion_gemma")


def register() -> None:
    """Make the Auto classes of transformers know every model family of this package."""
    for family in _FAMILIES:
        import_module(f"oled.models.{family}")


__all__ = ["register"]
