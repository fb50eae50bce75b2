"""What stands beside every result: times without a policy, a lower bound, and the oracles.

`ideal`: every active expert a hit, computed on the GPU alone; no bound, since work shared with the
CPU can beat it. `all_resident`: the same without the runtime's overhead. `bound_relaxed`: per
layer-step the least of max(GPU, CPU) over the number of experts that the CPU takes, without copies,
contention or policy time; no policy can be faster.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from oled._jit import bare_njit
from oled.hardware.costs import CostTables
from oled.trace.steps import Steps


@dataclasses.dataclass(frozen=True, slots=True)
class References:
    """Time of every forward, i64[F] nanoseconds."""

    ideal_ns: NDArray[np.int64]
    all_resident_ns: NDArray[np.int64]
    bound_relaxed_ns: NDArray[np.int64]


def references(steps: Steps, costs: CostTables) -> References:
    """The three times for each forward of `steps`."""
    ideal, resident = (
        costs.head_ns + _by_forward(costs.dense_of_steps(times, steps), steps)
        for times in (costs.dense_ns, costs.dense_kernel_ns)
    )
    bound = ideal.copy()
    of_step = np.repeat(np.arange(steps.num_steps), np.diff(steps.offsets))
    _add_layers(
        steps.step_offsets,
        steps.layer,
        steps.offsets,
        steps.count[np.lexsort((steps.count, of_step))],
        steps.top_k,
        costs.layer_class,
        costs.gpu_ns,
        costs.gpu_kernel_ns,
        costs.gpu_bound_ns,
        costs.cpu_ns,
        costs.cpu_call_ns + int(costs.act_out_ns[0]) + int(costs.act_back_ns[0]),
        ideal,
        resident,
        bound,
    )
    return References(ideal, resident, bound)


def _by_forward(times: NDArray[np.int64], steps: Steps) -> NDArray[np.int64]:
    """Times of the layer-steps [S] added up: [F]."""
    total = np.zeros(steps.num_forwards, np.int64)
    np.add.at(total, steps.forward, times)
    return total


@bare_njit
def _add_layers(
    step_offsets: NDArray[np.int64],
    layer: NDArray[np.int64],
    offsets: NDArray[np.int64],
    count: NDArray[np.int32],
    top_k: int,
    layer_class: NDArray[np.int64],
    gpu_ns: NDArray[np.int64],
    gpu_kernel_ns: NDArray[np.int64],
    gpu_bound_ns: NDArray[np.int64],
    cpu_ns: NDArray[np.int64],
    cpu_fixed_ns: int,
    ideal: NDArray[np.int64],
    resident: NDArray[np.int64],
    bound: NDArray[np.int64],
) -> None:
    """Add the layers' times to those of the forwards; `count` i32[N] ascends in each step."""
    for forward in range(ideal.size):
        for step in range(step_offsets[forward], step_offsets[forward + 1]):
            row = layer_class[layer[step]]
            counts = count[offsets[step] : offsets[step + 1]]
            active, assignments = counts.size, 0
            for m in range(active):
                assignments += counts[m]
            tokens = (assignments + top_k - 1) // top_k
            ideal[forward] += gpu_ns[row, tokens, active]
            resident[forward] += gpu_kernel_ns[row, tokens, active]
            # The CPU takes m experts: at least the m shortest; the GPU keeps at least the tokens
            # that are left when the m busiest are gone.
            best = gpu_bound_ns[row, tokens, active]
            on_cpu, taken = cpu_fixed_ns, 0
            for m in range(1, active + 1):
                on_cpu += cpu_ns[row, counts[m - 1]]
                taken += counts[active - m]
                left = (assignments - taken + top_k - 1) // top_k
                best = min(best, max(on_cpu, gpu_bound_ns[row, left, active - m]))
            bound[forward] += best
