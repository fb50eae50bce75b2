"""Types of arrays, named once for the whole package."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
ExpertIds = NDArray[np.uint16]
"""Expert ids as traces store them; `oled.trace.NO_EXPERT` marks an unused slot."""
