from __future__ import annotations

import pytest

from tests.live import build


@pytest.fixture(scope="session")
def ready():
    """The first forwards of the demo's routing, with random weights."""
    return build.demo()


@pytest.fixture(scope="session")
def resident(ready):
    """The outputs with all experts in their slots."""
    return build.run(ready, build.RESIDENT, 128).outputs
