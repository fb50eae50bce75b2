"""Public recordings beside the checkout; a test that needs one skips where it is absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data" / "routing"


@pytest.fixture(scope="session")
def recording() -> Callable[[str], Path]:
    """The folder of a recording, by its name."""

    def find(name: str) -> Path:
        folder = DATA / name
        if not folder.is_dir():
            pytest.skip(f"needs ../shared/data/routing/{name}, which is not there")
        return folder

    return find
