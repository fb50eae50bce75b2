"""Find conf/, plots/, traces/ and studies/: inside an installed wheel, else in this checkout.

`oled.bundled.plots.fig03` is plots/fig03.py, and `oled.bundled.studies.fig03` is
experiments/studies/fig03.py, beside *this* copy of oled: two checkouts never mix their files.
"""

from pathlib import Path

_INSIDE = Path(__file__).parent
_CHECKOUT = Path(__file__).parents[2]

HOME, STUDIES = (
    (_INSIDE, _INSIDE / "studies")
    if (_INSIDE / "conf").is_dir()
    else (_CHECKOUT, _CHECKOUT / "experiments" / "studies")
)
"""The folder that holds conf/, plots/ and traces/, and that of the studies."""

__path__ = [str(HOME), str(STUDIES.parent)]
