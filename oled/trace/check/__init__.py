"""`check`: prove a trace whole, or say where it is not."""

from oled.trace.check.report import RULES, Finding, Report
from oled.trace.check.run import check

__all__ = ["RULES", "Finding", "Report", "check"]
