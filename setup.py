"""Put conf/, plots/, traces/ and the studies into the wheel, below `oled/bundled`.

These folders lie at the top of the repository, where people look for them. An editable installation
uses them there: `oled/bundled/__init__.py` finds them beside itself. Everything else is in
pyproject.toml.
"""

from setuptools import find_packages, setup

BUNDLED = {
    "oled.bundled.conf": "conf",
    "oled.bundled.experiments": "experiments",
    "oled.bundled.experiments.studies": "experiments/studies",
    "oled.bundled.plots": "plots",
    "oled.bundled.traces": "traces",
}

setup(
    packages=[*find_packages(include=["oled", "oled.*"]), *BUNDLED],
    package_dir={"oled": "oled", **BUNDLED},
)
