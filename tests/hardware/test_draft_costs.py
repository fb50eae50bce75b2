"""What a draft's own expert costs: one launch, in draft forwards alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware.shapes import MINI, costs, trace_geometry
from oled.hardware import load_profile
from oled.trace.errors import TraceError
from oled.trace.schema import Geometry, Phase
from tests.sim.build import Forward, make_steps

LAYERS = len(MINI.moe_layers)


def drafting(units: int) -> Geometry:
    return replace(trace_geometry(MINI), draft_experts=units)


def test_a_draft_expert_is_one_launch_of_a_wide_expert() -> None:
    """Its weights read, and its arithmetic, as the formula has them for a group."""
    profile = load_profile("rtx5090_xeon8470q")
    tables, tokens = costs(drafting(2), profile), 16
    read = 2 * MINI.expert_bytes / profile.moe_eff.base * 1e9
    flops = 2 * 2 * MINI.expert_params * tokens
    computed = flops / (profile.bf16_peak.base * profile.moe_gemm_share.base) * 1e9
    expected = profile.moe_t0.base + (read**1.5 + computed**1.5) ** (2 / 3)
    assert tables.draft_ns[0, tokens] == pytest.approx(expected, abs=1)
    assert (costs(drafting(0), profile).draft_ns == 0).all()


def test_it_is_paid_in_every_layer_of_a_draft_and_nowhere_else() -> None:
    layer = {one: {0: 16} for one in range(LAYERS)}
    phases = (Phase.DENOISE, Phase.DRAFT, Phase.VERIFY)
    steps = make_steps([Forward(layer, phase=phase) for phase in phases], [256] * LAYERS)
    tables = costs(drafting(1))
    found = tables.dense_of_steps(np.repeat(tables.dense_ns, 3), steps).reshape(3, LAYERS)
    own = tables.draft_ns[0, 16]
    assert own > 0
    assert (found == tables.dense_ns[0] + np.array([[0], [own], [0]])).all()


def test_a_geometry_without_draft_experts_is_written_as_before() -> None:
    assert "draft_experts" not in drafting(0).to_json()
    assert Geometry.from_json(drafting(2).to_json()) == drafting(2)
    with pytest.raises(TraceError, match="'draft_experts' is -1"):
        drafting(-1)
