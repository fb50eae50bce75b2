"""A hardware profile from a few measured values: `hardware=FILE.yaml` of a host that was probed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import yaml

from oled.errors import UserError, nearest
from oled.field import parts
from oled.hardware.files import shipped
from oled.hardware.profile import Profile, load_profile
from oled.hardware.quantity import Dimension, Quantity, Tag

BY_MEMORY = ("gpu_mem", "moe_eff", "dense_layer_mini", "dense_layer_flash", "lm_head_mini")
"""Numbers of a card that follow its memory rate."""
PROBE_SPREAD = 0.05
"""Of a probe: two of one machine differ by so much (the bench's relaunches)."""
KERNEL = {"cpu_expert_tuned": (0.95, 0.80, 1.0), "cpu_expert_torch": (0.5, 0.2, 0.8)}
"""Value, low and high of what experts reach, as shares of the host's read rate."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probes:
    """Measured values, GB/s; None where a part's data sheet is taken instead."""

    link: float | None = None
    read: float | None = None
    both: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name}={value:g}: a rate in GB/s is above 0")


def profile(gpu: str, cpu: str, probes: Probes) -> Profile:
    """Return the profile of a host, everything that was not probed by its named parts.

    Raises: UserError where a part is not in the catalogue, or needed and not named.
    """
    card, host = parts.gpu(gpu), parts.cpu(cpu)
    if card is None:
        raise UserError(f"gpu '{gpu}' is not in the catalogue; {nearest(gpu, parts.names('gpus'))}")
    if cpu and host is None:
        raise UserError(f"cpu '{cpu}' is not in the catalogue; {nearest(cpu, parts.names('cpus'))}")
    if host is None and probes.read is None:
        raise UserError("name the CPU (cpu=…), or say what it reads (read=GB/s)")
    by_parts = parts.memory(card, host) if host is not None else None
    read = probes.read or (by_parts.cpu if by_parts else 0.0)
    link = probes.link or min(parts.link_gbps(card, host), read)
    both = probes.both or min(read + link, parts.BOTH_SHARE * read)
    base = _nearest_card(card.memory_gbps)
    values: dict[str, Any] = _scaled(base, card.memory_gbps / base.gpu_mem.value)
    for name in ("h2d_pinned", "d2h_pinned"):
        values[name] = _rate(link, probes.link is not None)
    values["cpu_stream"] = _rate(read, probes.read is not None)
    for name, shares in KERNEL.items():
        value, low, high = (share * read for share in shares)
        values[name] = Quantity(
            value, low, high, "GB/s", Tag.DERIVED, "share of what the host reads"
        )
    values["dram_share"] = _share(both / read, probes.both is not None)
    return dataclasses.replace(
        base,
        name="probed",
        description=f"{card.name} with {host.name if host else 'a host'}, from probes and parts",
        gpu=gpu,
        host=cpu or "not named",
        gpu_tables=(),
        cpu_tables=(),
        **values,
    )


def as_yaml(found: Profile) -> str:
    """Return a profile as a file that `hardware=FILE.yaml` takes."""
    data: dict[str, Any] = {
        name: getattr(found, name) for name in ("name", "description", "gpu", "host", "dtype")
    }
    for name, quantity in found.quantities().items():
        data[name] = dataclasses.asdict(quantity) | {"tag": str(quantity.tag)}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=200)


def _nearest_card(memory_gbps: float) -> Profile:
    """Return the shipped profile whose card's memory is nearest, of those of real machines."""
    profiles = [load_profile(name) for name in shipped("hardware") if name != "emulated"]
    return min(profiles, key=lambda known: abs(math.log(known.gpu_mem.value / memory_gbps)))


def _scaled(base: Profile, times: float) -> dict[str, Any]:
    """Return the card's numbers at `times` the memory rate: rates grow, times shrink."""
    found: dict[str, Any] = {}
    for name in BY_MEMORY:
        quantity: Quantity = getattr(base, name)
        by = times if quantity.dimension is Dimension.RATE else 1 / times
        source = f"{base.name} by memory rate: {quantity.source}"
        found[name] = Quantity(
            by * quantity.value, by * quantity.low, by * quantity.high, quantity.unit,
            Tag.DERIVED, source,
        )  # fmt: skip
    return found


def _rate(value: float, probed: bool) -> Quantity:
    spread = PROBE_SPREAD if probed else 0.25
    tag, source = (Tag.MEASURED, "probed") if probed else (Tag.DERIVED, "data sheets of its parts")
    return Quantity(value, (1 - spread) * value, (1 + spread) * value, "GB/s", tag, source)


def _share(value: float, probed: bool) -> Quantity:
    tag = Tag.MEASURED if probed else Tag.ASSUMED
    source = "both at once over the read rate" if probed else "as the bench's development hosts"
    return Quantity(value, 0.95 * value, 1.05 * value, "1", tag, source)
