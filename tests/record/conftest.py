"""The models and settings of tests/running."""

from tests.running.conftest import (  # noqa: F401  (fixtures)
    llada,
    loaded,
    model,
    quick_calibration,
    qwen,
    tokenizer,
)
