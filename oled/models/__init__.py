"""Models: shapes without weights (`catalogue`), LLaDA2 for transformers 5, the bundled checkpoint.

Importing this package or `oled.models.catalogue` loads no torch. `register()` makes
`AutoModelForCausalLM` know LLaDA2; so does importing `oled.models.llada2`.
"""

from __future__ import annotations

from importlib import import_module


def register() -> None:
    """Make the Auto classes of transformers know every model family of this package."""
    import_module("oled.models.llada2")


__all__ = ["register"]
