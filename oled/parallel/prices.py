"""The cost of a step on several GPUs: the numbers that placements and the clock share."""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.hardware.costs import CostTables
from oled.parallel.topology import Topology
from oled.types import Ints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Costs of one trace on one kind of GPU and one topology. C classes of layers."""

    topology: Topology
    num_experts: Ints  # [L]
    expert_bytes: Ints  # [L]
    layer_class: Ints  # [L]
    gpu_ns: Ints  # [C, G+1, E+1] one launch group, by tokens = ceil(pairs / k) and active experts
    bound_ns: Ints  # [C, G+1, E+1] <= gpu_ns and sub-additive
    token_bytes: int  # activations of a token, one way
    top_k: int

    @classmethod
    def of(
        cls, costs: CostTables, topology: Topology, num_experts: Ints, token_bytes: int, top_k: int
    ) -> Prices:
        return cls(
            topology,
            num_experts,
            costs.expert_bytes,
            costs.layer_class,
            costs.gpu_ns,
            costs.gpu_bound_ns,
            token_bytes,
            top_k,
        )

    def group_ns(self, layer: int, pairs: Ints | int, active: Ints | int) -> Ints:
        """Return the times of launch groups by (token, expert) pairs and active experts."""
        found: Ints = self.gpu_ns[self.layer_class[layer], self.groups(pairs), active]
        return found

    def least_ns(self, layer: int, pairs: int, active: int) -> int:
        """Return a lower bound of the busiest rank's time for any split of this work."""
        whole = int(self.bound_ns[self.layer_class[layer], self.groups(pairs), active])
        return -(-whole // self.topology.ranks)

    def groups(self, pairs: Ints | int) -> Ints:
        """Return the tokens that pairs of top_k a token amount to: the tables' first axis."""
        return np.asarray((pairs + self.top_k - 1) // self.top_k)

    def slopes(self, layer: int, pairs: float, active: float) -> tuple[float, float]:
        """Return a rank's (ns an active expert, ns a pair): its table's secants at this work."""
        table = self.gpu_ns[self.layer_class[layer]]
        most_tokens, most_experts = table.shape[0] - 1, table.shape[1] - 1
        tokens = min(max(1, round(pairs / self.top_k)), most_tokens)
        experts = min(max(1, round(active)), most_experts)
        an_expert = (table[tokens, most_experts] - table[tokens, 1]) / max(1, most_experts - 1)
        a_token = (table[most_tokens, experts] - table[1, experts]) / max(1, most_tokens - 1)
        return float(an_expert), float(a_token) / self.top_k
