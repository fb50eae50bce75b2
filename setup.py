"""The package mapping: folders of the checkout that are found inside `oled` once it is installed.

conf/, experiments/, plots/ and traces/ lie at the top of the repository, where people look for
them. Installed (editable or from a wheel) they are `oled._conf`, `oled._plots` and so on, and
`oled.paths` finds them in one way. Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

DATA = {
    "oled._conf": "conf",
    "oled._experiments": "experiments",
    "oled._plots": "plots",
    "oled._traces": "traces",
}

setup(
    packages=[*find_packages(include=["oled", "oled.*"]), *DATA],
    package_dir={"oled": "oled", **DATA},
)
