"""Find conf/, plots/, traces/ and experiments/: inside an installed wheel, else in this checkout.

`oled.bundled.plots.fig03` is plots/fig03.py beside *this* copy of oled, so that two checkouts never
mix their files.
"""

from pathlib import Path

_INSIDE = Path(__file__).parent

HOME = _INSIDE if (_INSIDE / "conf").is_dir() else Path(__file__).parents[2]
"""The folder that holds them: this package in a wheel (setup.py), else the checkout."""

__path__ = [str(HOME)]
