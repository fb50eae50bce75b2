"""Experts in two parts: an expansion (gate and up, two thirds) and a projection (down, one third).

Source: PCoMoE (arXiv 2609.01024; abstract only, no formulas are public): tokens follow paths from
an expansion to a projection, incompatible paths are pruned layer by layer, and work is grouped by
expansion, which is shared. *Reconstruction*: every expert keeps its own projection and takes its
expansion from a source, itself or another expert, so a path is (source of the expert, expert);
`oled.quality.pruning` chooses the sources by measured output errors and refits the projections.

A trace of split experts has two MoE layers for each of the model's: the expansions that a token
needs, each once, then its projections. All policies run on it unchanged, and each part has a
residency of its own.
"""

from oled.altered.split.plan import PathPlan
from oled.altered.split.trace import split_geometry, split_trace, write_split_trace

__all__ = ["PathPlan", "split_geometry", "split_trace", "write_split_trace"]
