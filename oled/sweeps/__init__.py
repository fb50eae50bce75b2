"""Sweeps: the product of axes, one row a configuration, on one core or on a cluster."""

from oled.sweeps.configuration import Configuration, product
from oled.sweeps.run import sweep
from oled.sweeps.workers import Workers

__all__ = ["Configuration", "Workers", "product", "sweep"]
