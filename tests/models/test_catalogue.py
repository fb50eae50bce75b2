"""The catalogue of shapes against published totals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oled.errors import UserError
from oled.models.catalogue import MODELS, ModelGeometry, model_geometry

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("name", "expert_mib", "all_gib"),
    [
        ("llada2_mini", 6, 28.5),
        ("llada2_flash", 24, 186),
        ("llada_moe_7b", 12, 12),
        ("sdar_30b", 9, 54),
        ("rnd1", 9, 54),
        ("diffusiongemma_26b", 11.34, 42.5),
        ("qwen3_30b", 9, 54),
        ("mixtral_8x7b", 336, 84),
        ("deepseek_v2_lite", 16.5, 26.8),
        ("olmoe_1b_7b", 12, 12),
        ("gpt_oss_20b", 12.62, 9.5),
        ("gpt_oss_120b", 12.62, 56.8),
        ("glm45_air", 33, 185.6),
    ],
)
def test_bytes_of_an_expert_and_of_all(name: str, expert_mib: float, all_gib: float) -> None:
    model = model_geometry(name)
    assert model.expert_bytes / MIB == pytest.approx(expert_mib, abs=0.005)
    assert model.experts_bytes_total / GIB == pytest.approx(all_gib, abs=0.05)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llada2_mini", 16.26),
        ("llada2_flash", 102.9),
        ("llada_moe_7b", 7.35),
        ("qwen3_30b", 30.5),
        ("mixtral_8x7b", 46.7),
        ("olmoe_1b_7b", 6.92),
        ("gpt_oss_120b", 116.8),
    ],
)
def test_all_weights_add_up_to_the_published_size(name: str, billions: float) -> None:
    assert model_geometry(name).total_params / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(
    ("name", "kib"), [("llada2_mini", 40), ("llada2_flash", 64), ("sdar_30b", 96)]
)
def test_cache_of_a_token(name: str, kib: int) -> None:
    assert model_geometry(name).kv_bytes_per_token == kib * 1024


def test_layer_ids_are_absolute() -> None:
    assert model_geometry("llada2_mini").moe_layers == tuple(range(1, 20))
    assert model_geometry("sdar_30b").moe_layers == tuple(range(48))


def test_gpt_oss_in_bf16() -> None:
    from dataclasses import replace

    assert replace(model_geometry("gpt_oss_20b"), weight_bytes=2.0).expert_bytes == 49_783_680


def test_every_entry_says_where_it_is_from() -> None:
    for name, model in MODELS.items():
        assert model.name == name
        assert model.source
        assert model.tag in {"configuration", "unverified", "bundled"}


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="llada2_mini"):
        model_geometry("llada2-mini")


def test_impossible_shapes_are_refused() -> None:
    shape = {
        "hidden_size": 8,
        "moe_intermediate_size": 8,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 8,
        "source": "here",
    }
    with pytest.raises(ValueError, match="2 of 2 layers dense"):
        ModelGeometry("x", 2, 2, num_experts=4, top_k=1, **shape)
    with pytest.raises(ValueError, match="top-5 of 4"):
        ModelGeometry("x", 2, 0, num_experts=4, top_k=5, **shape)


def test_shapes_need_no_torch() -> None:
    code = "import sys, oled.models, oled.models.catalogue; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
