"""Experts stored in parts: the parts of a layer cost together what the whole expert costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware.shapes import FLASH, MINI, costs, trace_geometry
from oled.trace.schema import Geometry


def in_halves(geometry: Geometry) -> Geometry:
    """Two MoE layers for each, of two thirds and one third of the bytes."""
    count = len(geometry.moe_layers)
    return replace(
        geometry,
        moe_layers=tuple(range(1, 2 * count + 1)),
        experts_per_layer=tuple(n for n in geometry.experts_per_layer for _ in range(2)),
        expert_bytes=tuple(b for s in geometry.expert_bytes for b in (s - s // 3, s // 3)),
        num_layers=geometry.num_layers + count,
        expert_parts=2,
    )


@pytest.mark.parametrize("runtime", ["graph_fused", "expert_loop"])
@pytest.mark.parametrize("profile", ["rtx5090_xeon8470q", "h200"])
def test_halves_cost_together_what_the_whole_costs(profile: str, runtime: str) -> None:
    whole = costs(MINI, profile, runtime)
    halves = costs(in_halves(trace_geometry(MINI)), profile, runtime)
    small, large = sorted(set(halves.layer_class.tolist()))
    assert halves.layer_class.tolist() == [large, small] * 19
    assert halves.expert_bytes[:2].tolist() == [MINI.expert_bytes * 2 // 3, MINI.expert_bytes // 3]
    for name in ("gpu_ns", "gpu_kernel_ns", "cpu_ns"):
        together = getattr(halves, name)[[small, large]].sum(axis=0)
        assert abs(together - getattr(whole, name)[0]).max() <= 2, name  # rounding
    latencies = halves.copy_ns.sum() - whole.copy_ns[0]
    assert 0 < latencies < 0.2 * whole.copy_ns[0]  # one more
    assert halves.policy_ns == whole.policy_ns // 2
    assert halves.opens.tolist() == [1, 0] * 19
    assert np.array_equal(halves.dense_ns, whole.dense_ns)


def test_halves_of_another_model() -> None:
    geometry = in_halves(trace_geometry(MINI))
    tables = costs(geometry, geometry_override=FLASH)
    assert tables.expert_bytes[:2].tolist() == [
        FLASH.expert_bytes * 2 // 3,
        FLASH.expert_bytes // 3,
    ]
    whole = costs(MINI, geometry_override=FLASH)
    assert abs(tables.gpu_ns.sum(axis=0) - whole.gpu_ns[0]).max() <= 2
