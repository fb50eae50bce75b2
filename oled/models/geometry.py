"""The shape of a mixture-of-experts model: what a simulation needs to know without its weights.

Sizes are of routed experts unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """Return absolute ids of the layers with routed experts."""
        return tuple(range(self.dense_layers, self.num_layers))

    @property
    def expert_params(self) -> int:
        """Return the weights of one routed expert (gate, up, down), without biases."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one routed expert: what one copy moves."""
        biases = self.hidden_size + 2 * self.moe_intermediate_size if self.expert_biases else 0
        return round(self.expert_params * self.weight_bytes + biases * BF16)

    @property
    def experts_bytes_total(self) -> int:
        """Return the bytes of all routed experts of all layers."""
        return len(self.moe_layers) * self.num_experts * self.expert_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bf16 bytes of one cached token in all layers (without sliding windows)."""
        elements = self.cached_elements or 2 * self.num_kv_heads * self.head_dim
        return round(self.num_layers * elements * BF16)

    @property
    def attention_params(self) -> int:
        """Return the projections of one layer; latent attention counts as grouped-query."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def other_params(self) -> int:
        """Return all weights but the routed experts and norms: what stays on the GPU."""
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
        """Return all weights."""
        return self.other_params + len(self.moe_layers) * self.num_experts * self.expert_params
