"""`stats`: what a trace shows about the locality of its routing."""

from oled.trace.stats.estimate import Estimate
from oled.trace.stats.locality import Locality, Overlap, Persistence
from oled.trace.stats.measure import locality, stats
from oled.trace.stats.text import locality_lines

__all__ = ["Estimate", "Locality", "Overlap", "Persistence", "locality", "locality_lines", "stats"]
