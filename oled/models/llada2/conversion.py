"""The mapping of published checkpoints (one matrix an expert) to our stacked 3-D experts.

Every other key is the same in both. transformers applies the list on loading and runs it backwards
on saving, so what we write is again in the published layout.
"""

from __future__ import annotations

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from .configuration_llada2 import LLaDA2MoeConfig


def checkpoint_conversions() -> list[WeightConverter]:
    """Return the mapping: expert M's gate over its up projection is `gate_up_proj[M]`."""
    return [
        WeightConverter(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]


def register_conversions() -> None:
    """Make transformers use the mapping for every model of type `llada2_moe`."""
    register_checkpoint_conversion_mapping(
        LLaDA2MoeConfig.model_type, checkpoint_conversions(), overwrite=True
    )
