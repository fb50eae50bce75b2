"""The shape of a mixture-of-experts model: what a simulation needs to know without its weights.

Sizes are of routed experts unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oled.models.quant import BF16, weight_bytes


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The shape of one model. Layers are numbered from 0; the first `dense_layers` have no router.

    `block_length` is the model's default for block diffusion, None where it decodes otherwise;
    `mask_id` likewise. `cached_elements` replaces 2 · kv heads · head size for models that cache
    something else (multi-head latent attention). In `window_layers` of the layers a token attends
    to the last `window` tokens only, itself included.
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
    matrices: int = 3  # of an expert, a shared expert, a dense layer: gate, up, down; 2 ungated
    weight_bytes: float = BF16  # of one expert weight as published
    dense_weight_bytes: float = BF16  # of every other weight
    kv_bytes: float = BF16  # of one cached element
    expert_biases: bool = False  # biases stay bf16 where the weights are smaller
    tied_embeddings: bool = False
    cached_elements: int | None = None
    window: int = 0
    window_layers: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dense_layers < self.num_layers:
            raise ValueError(f"{self.name}: {self.dense_layers} of {self.num_layers} layers dense")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.name}: top-{self.top_k} of {self.num_experts} experts")
        if self.matrices not in (2, 3):
            raise ValueError(f"{self.name}: experts of {self.matrices} matrices; they have 2 or 3")
        if (self.window > 0) != (self.window_layers > 0) or self.window_layers > self.num_layers:
            raise ValueError(
                f"{self.name}: a window of {self.window} tokens in {self.window_layers} layers"
            )

    def quantized(self, quant: str) -> ModelGeometry:
        """Return the same model with its routed experts stored in the format `quant`."""
        return replace(self, name=f"{self.name}@{quant}", weight_bytes=weight_bytes(quant))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return absolute ids of the layers with routed experts."""
        return tuple(range(self.dense_layers, self.num_layers))

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert, without biases."""
        return self.matrices * self.hidden_size * self.moe_intermediate_size

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert: what one copy moves."""
        biases = 0
        if self.expert_biases:
            biases = self.hidden_size + (self.matrices - 1) * self.moe_intermediate_size
        return round(self.expert_params * self.weight_bytes + biases * BF16)

    @property
    def experts_bytes_total(self) -> int:
        """Return the bytes of all routed experts of all layers."""
        return len(self.moe_layers) * self.num_experts * self.expert_bytes

    @property
    def kv_bytes_per_layer(self) -> float:
        """Bytes of one cached token in one layer."""
        return (self.cached_elements or 2 * self.num_kv_heads * self.head_dim) * self.kv_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one cached token in all layers, as long as no window is full."""
        return round(self.num_layers * self.kv_bytes_per_layer)

    def kv_bytes_total(self, context: int) -> int:
        """Return the bytes of `context` cached tokens; a layer with a window keeps no more."""
        kept = (self.num_layers - self.window_layers) * context
        kept += self.window_layers * min(context, self.window)
        return round(kept * self.kv_bytes_per_layer)

    @property
    def attention_params(self) -> int:
        """Return the projections of one layer; latent attention counts as grouped-query."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def moe_layer_params(self) -> int:
        """Weights of a MoE layer without its routed experts: attention, router, shared experts."""
        beside = self.num_experts + self.matrices * self.shared_intermediate_size
        return self.attention_params + self.hidden_size * beside

    @property
    def other_params(self) -> int:
        """Return all weights but the routed experts and norms: what stays on the GPU."""
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        per_moe_layer = self.moe_layer_params - self.attention_params
        per_dense_layer = self.matrices * self.hidden_size * self.dense_intermediate_size
        return (
            embeddings
            + self.num_layers * self.attention_params
            + len(self.moe_layers) * per_moe_layer
            + self.dense_layers * per_dense_layer
        )

    @property
    def other_bytes(self) -> int:
        """Bytes of all weights but the routed experts, as stored."""
        return round(self.other_params * self.dense_weight_bytes)

    @property
    def total_params(self) -> int:
        """Return all weights."""
        return self.other_params + len(self.moe_layers) * self.num_experts * self.expert_params
