"""A named system: which parts it is made of. One YAML file each in `conf/policy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.altered.reroute import Reroute
from oled.errors import UserError, nearest
from oled.policies.files import PLACEMENT, composition_names, make_part, read_policy
from oled.policies.interface import Admission
from oled.policies.part import (
    NEEDS,
    Allocation,
    Dispatch,
    Part,
    Prefetch,
    Retention,
    ask_nothing,
)

_KINDS = {
    "retention": Retention,
    "allocation": Allocation,
    "dispatch": Dispatch,
    "prefetch": Prefetch,
}
_DEFAULTS = {
    "allocation": {"_target_": "oled.policies.allocation.uniform.Uniform"},
    "dispatch": {"_target_": "oled.policies.dispatch.transfer.AllTransfer"},
    "prefetch": {"_target_": "oled.policies.prefetch.none.NoPrefetch"},
}
_INITIAL = ("empty", "first", "last", "popular", "popular_overall")
_PREFILL = ("policy", "stream", "bypass")


@dataclasses.dataclass(frozen=True, slots=True)
class Composition:
    """Four parts and how they are put together."""

    name: str
    description: str
    source: str
    retention: Retention
    allocation: Allocation
    dispatch: Dispatch
    prefetch: Prefetch
    admission: Admission
    by_mention: bool = False  # sequential admission in the order of mention, not of ids
    initial: str = "empty"  # residents at the start: none, the first or last ids, the most popular
    # of each layer, or those of one list over all layers, which gives layers unequal slots
    prefill: str = "policy"  # prefill forwards: like the others, streamed, or bypassed
    scope: str | None = None  # overrides cache.scope where the system is one or the other
    overlap: bool = True  # False: copies, GPU and CPU wait for each other
    writes_back: bool = False  # evicted experts are copied to the host first
    cpu_kernel: str | None = None  # overrides cost.cpu_kernel where the released code has its own
    pinned: bool | None = None  # overrides cost.pinned likewise
    runtime: str | None = None  # overrides runtime likewise
    overhead_ns: int | None = None  # policy time of a layer-step; None: the runtime preset's
    predictor: str | None = None  # whose predictions it reads; None: the first that were recorded
    reroute: Reroute | None = None  # a rule that changes routes before anything is decided

    @property
    def parts(self) -> tuple[Part, Part, Part, Part]:
        return (self.retention, self.allocation, self.dispatch, self.prefetch)

    @property
    def needs(self) -> frozenset[str]:
        """What the trace (or the user) must provide; keys of `oled.policies.part.NEEDS`."""
        needs = frozenset[str]().union(*(part.needs for part in self.parts))
        if self.reroute is not None:
            needs |= self.reroute.needs
        return needs | {"calibration"} if self.initial.startswith("popular") else needs

    @property
    def machine_independent(self) -> bool:
        """Whether decisions are the same on every machine: retention and allocation see neither
        clock nor costs, so it is for dispatch and prefetch to say."""
        asks = type(self.prefetch).ask is not ask_nothing
        return not asks and not self.dispatch.reads_costs

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> Composition:
        """Read a composition; `where` (a file, or 'policy') begins every message."""
        known = {field.name for field in dataclasses.fields(cls)}
        if PLACEMENT in data:
            raise UserError(
                f"policy '{data.get('name', where)}' places experts on several GPUs: give "
                "topology=NAME to `oled simulate`, or use oled.parallel.api.simulate"
            )
        for key in data:
            if key not in known:
                raise UserError(f"{where}: unknown key '{key}': {nearest(key, known)}")
        for key in ("name", "description", "retention", "admission"):
            if key not in data:
                raise UserError(f"{where}: '{key}' is missing")
        values = {**_DEFAULTS, **data}
        parts = {k: make_part(values[k], base, f"{where}: {k}") for k, base in _KINDS.items()}
        rest = {k: v for k, v in data.items() if k not in _KINDS and k != "admission"}
        rest.setdefault("source", "")
        if rest.get("reroute") is not None:
            rest["reroute"] = make_part(rest["reroute"], Reroute, f"{where}: reroute")
        _one_of(rest.get("initial", "empty"), _INITIAL, f"{where}: initial")
        _one_of(rest.get("prefill", "policy"), _PREFILL, f"{where}: prefill")
        admission = str(data["admission"]).lower()
        _one_of(admission, [a.name.lower() for a in Admission], f"{where}: admission")
        if not parts["retention"].scores and admission != "frozen":
            raise UserError(
                f"{where}: admission is '{admission}', but the retention scores nothing: it must "
                f"be 'frozen'"
            )
        return cls(**rest, **parts, admission=Admission[admission.upper()])


def _one_of(value: str, known: Any, where: str) -> None:
    if value not in known:
        raise UserError(f"{where} is '{value}': {nearest(str(value), known)}")


def load_composition(policy: str | Path | Mapping[str, Any] | Composition) -> Composition:
    """A composition by its name in `conf/policy`, by the path of a YAML file, or from a mapping."""
    if isinstance(policy, Composition):
        return policy
    data, where = read_policy(policy)
    return Composition.from_mapping(data, where)


def list_compositions() -> list[tuple[str, str, tuple[str, ...]]]:
    """(name, one line, what it needs in words) of every shipped composition."""
    rows = []
    for name in composition_names():
        composition = load_composition(name)
        needs = tuple(NEEDS[need] for need in sorted(composition.needs))
        rows.append((name, composition.description, needs))
    return rows
