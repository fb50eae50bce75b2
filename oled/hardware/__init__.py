"""What a machine costs: profiles with units and provenance, runtime presets, the cost model.

`load_profile` and `load_runtime` read `conf/hardware` and `conf/runtime`; `build_costs` turns them,
once per trace, into tables of integer nanoseconds. No torch here.
"""

from oled.hardware.costs import CostTables, build_costs
from oled.hardware.describe import crossover, crossovers, describe
from oled.hardware.profile import Profile, list_profiles, load_profile
from oled.hardware.quantity import Quantity
from oled.hardware.runtime import Runtime, list_runtimes, load_runtime

__all__ = [
    "CostTables",
    "Profile",
    "Quantity",
    "Runtime",
    "build_costs",
    "crossover",
    "crossovers",
    "describe",
    "list_profiles",
    "list_runtimes",
    "load_profile",
    "load_runtime",
]
