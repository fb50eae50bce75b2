"""Shapes of mixture-of-experts models: what a simulation needs to know without loading weights.

No torch here. Numbers come from public configurations; `source` says which, `tag` how sure they
are: *configuration* (read in a published one), *unverified* (at least one number was not),
*bundled* (the checkpoint in this package). Sizes are of routed experts unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from oled.errors import UserError, nearest

BF16 = 2.0
MXFP4 = 4.25 / 8  # 4-bit values, one 8-bit scale for 32 of them


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The shape of one model. Layers are numbered from 0; the first `dense_layers` have no router.

    `block_length` is the model's default for block diffusion, None where it decodes otherwise;
    `mask_id` likewise. `cached_elements` replaces 2 · kv heads · head size for models that cache
    something else (multi-head latent attention).
    """

    name: str
    num_layers: int
    dense_layers: int
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    source: str
    tag: str = "configuration"
    dense_intermediate_size: int = 0  # of the dense layers
    shared_experts: int = 0
    shared_intermediate_size: int = 0  # width of all that runs for every token beside the experts
    block_length: int | None = None
    mask_id: int | None = None
    weight_bytes: float = BF16  # of one expert weight as published
    expert_biases: bool = False  # biases stay bf16 where the weights are smaller
    tied_embeddings: bool = False
    cached_elements: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dense_layers < self.num_layers:
            raise ValueError(f"{self.name}: {self.dense_layers} of {self.num_layers} layers dense")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.name}: top-{self.top_k} of {self.num_experts} experts")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Absolute ids of the layers with routed experts."""
        return tuple(range(self.dense_layers, self.num_layers))

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert (gate, up, down), without biases."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert: what one copy moves."""
        biases = self.hidden_size + 2 * self.moe_intermediate_size if self.expert_biases else 0
        return round(self.expert_params * self.weight_bytes + biases * BF16)

    @property
    def experts_bytes_total(self) -> int:
        """Bytes of all routed experts of all layers."""
        return len(self.moe_layers) * self.num_experts * self.expert_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one cached token in all layers, in bf16 (sliding windows not regarded)."""
        elements = self.cached_elements or 2 * self.num_kv_heads * self.head_dim
        return round(self.num_layers * elements * BF16)

    @property
    def attention_params(self) -> int:
        """Projections of one layer; latent attention is counted as if it were grouped-query."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def other_params(self) -> int:
        """All weights but the routed experts: what stays on the GPU in any case. No norms."""
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        per_moe_layer = self.hidden_size * (self.num_experts + 3 * self.shared_intermediate_size)
        per_dense_layer = 3 * self.hidden_size * self.dense_intermediate_size
        return (
            embeddings
            + self.num_layers * self.attention_params
            + len(self.moe_layers) * per_moe_layer
            + self.dense_layers * per_dense_layer
        )

    @property
    def total_params(self) -> int:
        """All weights."""
        return self.other_params + len(self.moe_layers) * self.num_experts * self.expert_params


_CATALOGUE = (
    ModelGeometry(
        name="tiny",
        num_layers=5,
        dense_layers=1,
        hidden_size=128,
        moe_intermediate_size=32,
        dense_intermediate_size=384,
        num_experts=128,
        top_k=4,
        shared_experts=1,
        shared_intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=1024,
        block_length=16,
        mask_id=1,
        tied_embeddings=True,
        source="oled/models/tiny/config.json",
        tag="bundled",
    ),
    ModelGeometry(
        name="llada2_mini",
        num_layers=20,
        dense_layers=1,
        hidden_size=2048,
        moe_intermediate_size=512,
        dense_intermediate_size=5120,
        num_experts=256,
        top_k=8,
        shared_experts=1,
        shared_intermediate_size=512,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=157184,
        block_length=32,
        mask_id=156895,
        source="LLaDA2.0-mini config.json; the same shape as LLaDA2.1-mini and Ling-mini-2.0",
    ),
    ModelGeometry(
        name="llada2_flash",
        num_layers=32,
        dense_layers=1,
        hidden_size=4096,
        moe_intermediate_size=1024,
        dense_intermediate_size=9216,
        num_experts=256,
        top_k=8,
        shared_experts=1,
        shared_intermediate_size=1024,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=157184,
        block_length=32,
        mask_id=156895,
        source="dFactory's llada2_flash config.json; the same shape as Ling-flash-2.0",
    ),
    ModelGeometry(
        name="llada_moe_7b",
        num_layers=16,
        dense_layers=0,
        hidden_size=2048,
        moe_intermediate_size=1024,
        num_experts=64,
        top_k=8,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=157184,
        block_length=64,
        mask_id=156895,
        source="LLaDA-MoE-7B-A1B: 64 experts, top-8 from its paper; widths fit 7.35 B in all",
        tag="unverified",
    ),
    ModelGeometry(
        name="sdar_30b",
        num_layers=48,
        dense_layers=0,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        block_length=4,
        mask_id=151669,
        source="SDAR-30B-A3B-Chat config.json; mask id from SGLang; also as -b8 to -b64",
    ),
    ModelGeometry(
        name="rnd1",
        num_layers=48,
        dense_layers=0,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        mask_id=151669,
        source="RND1-Base-0910 configuration_rnd.py; full bidirectional, no blocks, no cache",
    ),
    ModelGeometry(
        name="diffusiongemma_26b",
        num_layers=30,
        dense_layers=0,
        hidden_size=2816,
        moe_intermediate_size=704,
        num_experts=128,
        top_k=8,
        shared_intermediate_size=2112,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        vocab_size=262144,
        block_length=256,
        tied_embeddings=True,
        source="a copy of DiffusionGemma-26B-A4B's config.json; expert width fits 25.2 B in all; "
        "global layers have larger heads, not regarded",
        tag="unverified",
    ),
    ModelGeometry(
        name="qwen3_30b",
        num_layers=48,
        dense_layers=0,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        source="Qwen3-30B-A3B: slime's launch script",
    ),
    ModelGeometry(
        name="mixtral_8x7b",
        num_layers=32,
        dense_layers=0,
        hidden_size=4096,
        moe_intermediate_size=14336,
        num_experts=8,
        top_k=2,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
        source="transformers' defaults of MixtralConfig",
    ),
    ModelGeometry(
        name="deepseek_v2_lite",
        num_layers=27,
        dense_layers=1,
        hidden_size=2048,
        moe_intermediate_size=1408,
        dense_intermediate_size=10944,
        num_experts=64,
        top_k=6,
        shared_experts=2,
        shared_intermediate_size=2 * 1408,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=102400,
        cached_elements=512 + 64,  # latent and rotary key
        source="DeepSeek-V2-Lite config.json",
    ),
    ModelGeometry(
        name="olmoe_1b_7b",
        num_layers=16,
        dense_layers=0,
        hidden_size=2048,
        moe_intermediate_size=1024,
        num_experts=64,
        top_k=8,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=50304,
        source="OLMoE-1B-7B config.json",
    ),
    ModelGeometry(
        name="gpt_oss_20b",
        num_layers=24,
        dense_layers=0,
        hidden_size=2880,
        moe_intermediate_size=2880,
        num_experts=32,
        top_k=4,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201088,
        weight_bytes=MXFP4,
        expert_biases=True,
        source="slime's launch script of gpt-oss-20b; experts as published, in MXFP4",
    ),
    ModelGeometry(
        name="gpt_oss_120b",
        num_layers=36,
        dense_layers=0,
        hidden_size=2880,
        moe_intermediate_size=2880,
        num_experts=128,
        top_k=4,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201088,
        weight_bytes=MXFP4,
        expert_biases=True,
        source="transformers' defaults of GptOssConfig; experts as published, in MXFP4",
    ),
    ModelGeometry(
        name="glm45_air",
        num_layers=46,
        dense_layers=1,
        hidden_size=4096,
        moe_intermediate_size=1408,
        dense_intermediate_size=10944,
        num_experts=128,
        top_k=8,
        shared_experts=1,
        shared_intermediate_size=1408,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151552,
        source="INTELLECT-3-Base config.json, which has the shape of GLM-4.5-Air",
    ),
)

MODELS = {model.name: model for model in _CATALOGUE}
"""Every model known by name."""


def model_geometry(name: str) -> ModelGeometry:
    """The shape of a model; an unknown name is answered with the nearest known one."""
    if name not in MODELS:
        raise UserError(f"no model geometry '{name}': {nearest(name, MODELS)}")
    return MODELS[name]
