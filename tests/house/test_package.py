"""`import oled` is light, and what it names is there."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import oled


def test_importing_loads_nothing_heavy():
    heavy = {"torch", "numba", "pandas", "hydra"}
    code = f"import sys, oled; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_name_is_there():
    assert all(getattr(oled, name) is not None for name in oled.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = oled.simulat


def test_the_version_is_the_packages():
    assert metadata.version("oled") == oled.__version__
