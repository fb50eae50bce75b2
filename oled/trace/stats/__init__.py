"""`stats`: what a trace shows about the locality of its routing."""

from oled.trace.stats.estimate import Estimate
from oled.trace.stats.locality import Locality, Overlap, Persistence
from oled.trace.stats.measure import locality, stats

__all__ = ["Estimate", "Locality", "Overlap", "Persistence", "locality", "stats"]
