"""A transformers model's experts, moved into the host store; the model keeps views of them.

Letters: E experts of a layer, I width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oled.errors import UserError
from oled.live.backends.products import DTYPES
from oled.live.expert_file import ExpertFile
from oled.live.kernels import CLAMPED_SWIGLU, SILU, ExpertForm, combine, compute, group_pairs
from oled.live.store import FLOAT32, NUMBERS, HostStore, Numbers
from oled.running.modules import MoeLayer, experts_of
from oled.types import Floats, Ints

_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest output: sums in different orders, and rounding where the module is in half."""


def form_of_experts(entry: MoeLayer) -> ExpertForm:
    """How the experts of a layer are laid out; what is not known is refused by name.

    That the gate is what it looks like is checked by arithmetic when the experts are taken.
    """
    experts: Any = entry.experts
    kind = type(experts).__name__
    down = experts.get_parameter("down_proj")
    if not experts.has_gate or experts.has_post_expert_norm:
        raise UserError(f"{entry.name}: {kind} has no gate, or a norm behind it; not known here")
    hidden, width = down.shape[1:]
    if experts.is_transposed:
        hidden, width = width, hidden
    clamped = experts.has_bias and not experts.is_concatenated
    return ExpertForm(
        hidden=hidden,
        width=width,
        interleaved=not experts.is_concatenated,
        biased=experts.has_bias,
        activation=CLAMPED_SWIGLU if clamped else SILU,
        alpha=float(experts.alpha) if clamped else 0.0,
        limit=float(experts.limit) if clamped else 0.0,
    )


def common_form(layers: Sequence[MoeLayer]) -> ExpertForm:
    """The form of all layers' experts, which must be one."""
    forms = [form_of_experts(entry) for entry in layers]
    for entry, form in zip(layers, forms, strict=True):
        if form != forms[0]:
            raise UserError(f"{entry.name} has experts of another form than {layers[0].name}")
    return forms[0]


def numbers_of(layers: Sequence[MoeLayer], allowed: Sequence[str]) -> Numbers:
    """The numbers that all experts are kept in, which must be one kind of those allowed."""
    kinds = {entry.name: entry.experts.get_parameter("down_proj").dtype for entry in layers}
    first = next(iter(kinds.values()))
    for name, dtype in kinds.items():
        kind = str(dtype).removeprefix("torch.")
        if kind not in allowed:
            raise UserError(f"{name} is in {kind}: this backend computes in {' or '.join(allowed)}")
        if dtype is not first:
            raise UserError(f"{name} is in {kind}, other layers are in {first}")
    return NUMBERS[str(first).removeprefix("torch.")]


@torch.no_grad()
def take_experts(layers: Sequence[MoeLayer]) -> HostStore:
    """Move all experts into a host store, a layer at a time; the modules get views of it."""
    form, numbers = common_form(layers), numbers_of(layers, tuple(NUMBERS))
    store = HostStore.empty(form, _counts(layers), numbers)
    for index, entry in enumerate(layers):
        _take_layer(entry, store, index, keep=True)
    return store


@torch.no_grad()
def file_experts(layers: Sequence[MoeLayer], path: Path) -> ExpertFile:
    """Move all experts into a file, a layer at a time; the modules keep shapes without numbers."""
    form, numbers = common_form(layers), numbers_of(layers, (FLOAT32.name,))

    def rows() -> Iterator[Floats]:
        for entry in layers:
            layer = HostStore.empty(form, _counts([entry]), numbers)
            _take_layer(entry, layer, 0, keep=False)
            yield from layer.block

    return ExpertFile.written(path, form, _counts(layers), rows())


def _counts(layers: Sequence[MoeLayer]) -> Ints:
    return np.array([entry.num_experts for entry in layers], np.int64)


@torch.no_grad()
def _take_layer(entry: MoeLayer, store: HostStore, index: int, *, keep: bool) -> None:
    """Copy a layer's experts into `store` and check that they compute the same there.

    The module's parameters become views of the store or, unless `keep`, tensors without memory.
    """
    rows = torch.from_numpy(store.rows(index)).view(DTYPES[store.numbers.name])
    expected = _probe(entry)
    for name, view in _views(rows, entry.experts, store.form).items():
        view.copy_(entry.experts.get_parameter(name))
        kept = view if keep else view.to("meta")
        taken = nn.Parameter(kept, requires_grad=False)
        for module in entry.modules:
            setattr(module.experts, name, taken)
    _verify(entry, store, index, expected)


def size_of_the_rest(model: nn.Module, layers: Sequence[MoeLayer]) -> int:
    """Bytes of everything in the model but its experts."""
    tensors = {id(tensor): tensor for _, _, tensor in _rest(model, layers)}
    return sum(tensor.nbytes for tensor in tensors.values())


def move_the_rest(model: nn.Module, layers: Sequence[MoeLayer], device: str) -> None:
    """Everything but the experts goes to a device; what is shared stays shared."""
    moved: dict[int, Tensor] = {}
    for owner, name, tensor in list(_rest(model, layers)):
        if id(tensor) not in moved:
            there = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_parameter else there
        owner[name] = moved[id(tensor)]


def _rest(
    model: nn.Module, layers: Sequence[MoeLayer]
) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Parameters and buffers outside the experts, each with its owner and name there."""
    experts = set(experts_of(layers))
    for module in model.modules():
        if module in experts:
            continue
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield owner, name, tensor


def _views(rows: Tensor, experts: Any, form: ExpertForm) -> dict[str, Tensor]:
    """The module's parameters as they lie in `rows` [E, S]."""
    hidden, width = form.hidden, form.width
    down = 2 * width * hidden
    bias = down + hidden * width
    views = {
        "gate_up_proj": rows[:, :down].view(-1, 2 * width, hidden),
        "down_proj": rows[:, down:bias].view(-1, hidden, width),
    }
    if experts.is_transposed:
        views = {name: view.transpose(1, 2) for name, view in views.items()}
    if form.biased:
        views["gate_up_proj_bias"] = rows[:, bias : bias + 2 * width]
        views["down_proj_bias"] = rows[:, bias + 2 * width :]
    return views


def _probe_inputs(entry: MoeLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Two tokens, each through the first and the last expert."""
    hidden = form_of_experts(entry).hidden
    x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, entry.num_experts - 1]] * 2)
    dtype = entry.experts.get_parameter("down_proj").dtype
    return x.to(dtype), ids, torch.tensor([[0.75, 0.25], [0.5, 1.5]]).to(dtype)


def _probe(entry: MoeLayer) -> Tensor:
    output: Tensor = entry.modules[0].plain_forward()(entry.experts, *_probe_inputs(entry))
    return output.float()


def _verify(entry: MoeLayer, store: HostStore, index: int, expected: Tensor) -> None:
    """Our arithmetic on the store, in float32, must be the module's own."""
    x, ids, weights = (given.numpy() for given in _as_float32(_probe_inputs(entry)))
    chosen = np.unique(ids)
    experts = store.numbers.widened(store.rows(index)[chosen])
    positions = np.full(entry.num_experts, -1, np.int64)
    positions[chosen] = np.arange(len(chosen))
    starts, pairs = np.zeros(len(chosen) + 1, np.int64), np.zeros(ids.size, np.int64)
    group_pairs(ids.reshape(-1).astype(np.int32), positions, starts, pairs)
    y = np.zeros((ids.size, store.form.hidden), np.float32)
    out = np.zeros((len(x), store.form.hidden), np.float32)
    compute(
        experts,
        np.arange(len(chosen)),
        np.arange(len(chosen)),
        starts,
        pairs,
        ids.shape[1],
        x,
        weights.reshape(-1),
        y,
        np.zeros(store.form.width, np.float32),
        store.form,
    )
    combine(y, ids.shape[1], out)
    worst = float((expected - torch.from_numpy(out)).abs().max())
    if not worst <= _TOLERANCE[store.numbers.name] * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"{entry.name}: {type(entry.experts).__name__} computes something else than the gated "
            f"layer that its parameters look like (off by {worst:.2g}); not known here"
        )


def _as_float32(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = given
    return x.float(), ids, weights.float()
