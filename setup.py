"""Put conf/, plots/, traces/ and experiments/studies/ into the wheel, below `oled/bundled`.

These folders lie at the top of the repository, where people look for them. An editable installation
uses them there: `oled/bundled/__init__.py` finds them beside itself. Everything else is in
pyproject.toml. How the bundled model was made (experiments/training) stays out of the wheel.
`hydra_plugins` is Hydra's namespace for plugins: ours may live nowhere else.
"""

from setuptools import find_packages, setup

BUNDLED = {
    "oled.bundled.conf": "conf",
    "oled.bundled.plots": "plots",
    "oled.bundled.studies": "experiments/studies",
    "oled.bundled.traces": "traces",
}

setup(
    packages=[*find_packages(include=["oled", "oled.*"]), *BUNDLED, "hydra_plugins.oled_sweeps"],
    package_dir={"oled": "oled", **BUNDLED},
)
