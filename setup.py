"""The package mapping: folders of the checkout that are found inside `oled` once it is installed.

conf/, traces/ and plots/ lie at the top of the repository, where people look for them. Installed
(editable or from a wheel) they are `oled._conf`, `oled._traces` and `oled._plots`, so `oled.paths`
finds them in one way. Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

DATA = {"oled._conf": "conf", "oled._plots": "plots", "oled._traces": "traces"}

setup(
    packages=[*find_packages(include=["oled", "oled.*"]), *DATA],
    package_dir={"oled": "oled", **DATA},
)
