"""Reports and published tables: a model, a host and an engine by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from oled.field import parts
from oled.field.events import Split, lru_misses, quickest_table, stated, static_layers
from oled.field.placement import Placement, placement
from oled.field.scenario import Events, Memory, Scenario
from oled.field.tables import Facts, UnpredictableError, number

GPU_SHARE = 0.80
"""The share of a card's memory rate that weights are read at in a decode."""
KERNEL_SHARE = {"plain": 0.95, "k": 0.92, "i": 0.65}
"""Of the CPU's read rate that experts' weights reach, by format: bf16, 8-bit and MXFP4; k-quants;
i-quants, which are bound by their look-ups."""
NOT_EXACT = (
    "deferral",
    "6 experts",
    "w/o adaptive",
    "adapmoe",
    "daop",
    "hobbit",
    "buddymoe",
    "speculative prefetch",
    "pre-gated",
    "swapmoe",
    "dmoe",
    "floe",
)
"""Systems that do not run the router's own experts, or not all of them."""
CACHES = ("bench", "freetoken", "imp", "seqmoe")
"""Engines whose share of experts on the GPU is a cache."""
IN_A_VM = 1.8
"""Times of a hand-off in a virtual machine, where waking a thread leaves it: 105 us a layer explain
ncmoe-a100, 60 us the desktops of development groups."""
A_TIME = r"decode|speed|latency per token|tpot|tbt|throughput, single"
NO_TIME = r"prefill|end-to-end|speed-up|over|cut|reduction"
NOT_MODELLED = {
    r"sharding": "it streams pieces of layers through the GPU",
    r"\bsd\b|sp-moe|specmoe|moe-speq|spec|mtp": "it decodes speculatively",
    r"unified memory|whole-layer|whole moe layer|layer offload|hf |accelerate|deepspeed|zero|"
    r"flexgen|moe-lightning|moe-gen|klotski|simple pipeline": "it moves whole layers or batches; "
    "single streams with experts apart are predicted",
}


@dataclass(frozen=True, slots=True)
class Report:
    """A row's words by what they say, whichever table it stands in."""

    model: str
    quant: str
    bytes_per_weight: float | None
    gpu: str
    gpu_gb: float | None
    cpu: str
    ram: str
    read_gbps: str
    link: str
    threads: float | None
    engine: str
    budget: str
    elsewhere: str
    context: str
    batch: str
    metric: str


def of_users(facts: Facts) -> Report:
    """Return the words of a row of `users.csv`."""
    return Report(
        facts["model"], facts["quant"], number(facts, "bytes_per_expert_weight"), facts["gpu"],
        number(facts, "gpu_mem_gb"), facts["cpu"], facts["ram"], facts["ram_gbps_stated"],
        facts["pcie"], number(facts, "threads"), facts["software"], facts["experts_on_gpu"],
        facts["experts_elsewhere"], facts["context"], facts["batch"], "decode speed",
    )  # fmt: skip


def of_published(facts: Facts) -> Report:
    """Return the words of a row of `published.csv`."""
    measured, by = facts.get("host_bw_gbps", ""), facts.get("host_bw_by", "")
    return Report(
        facts["model"], facts["quant"], None, facts["gpu"], number(facts, "gpu_mem_gb"),
        facts["cpu"], facts["ram"],
        f"{measured} measured {by}" if measured else "", facts["pcie_gbps"], None,
        facts["system"], facts["budget"], _elsewhere(facts["system"]), facts["in_len"],
        facts["batch"], facts["metric"],
    )  # fmt: skip


def _elsewhere(system: str) -> str:
    low = system.lower()
    if "without fetch" in low or "misses on cpu" in low:
        return "cpu"
    if re.search(r"offloading|moe-infinity|on-demand|ondemand|load on demand|yalis|seqmoe", low):
        return "pcie"
    if re.search(r"lru expert cache|lru cache|static expert cache|promoe|fate|eap", low):
        return "pcie"
    return "cpu+pcie" if re.search(r"freetoken|fetch|law table|hybrimoe|dali", low) else "cpu"


def scenario(report: Report) -> tuple[Scenario, bool]:
    """Return the scenario, and whether the host's rates were measured.

    Raises: UnpredictableError.
    """
    _refuse(report)
    shape, engine = parts.shape(report.model), parts.engine(report.engine)
    if shape is None:
        raise UnpredictableError(f"model '{report.model}' is not in the catalogue")
    if engine is None:
        raise UnpredictableError(f"engine '{report.engine}' is not in the catalogue")
    size, dense = _bytes_per_weight(report, shape)
    cached = "pcie" in report.elsewhere or "cache" in report.budget or "LRU" in report.engine
    cached |= engine.name in CACHES
    place = _by_memory(report, shape, size, dense, cached)
    if place is None:
        place = placement(report.budget, shape.layers, shape.experts, cached)
    if place is None:
        raise UnpredictableError(f"'{report.budget}' does not say which experts are on the GPU")
    if engine.name == "llama_cpp" and place.kind == "share" and not _by_expert(report):
        on_cpu = round(shape.layers * (1 - place.share))  # it splits by layers and no other way
        place = Placement("layers", on_cpu=on_cpu)
    host, probed = _host(report, place, engine.name)
    kernel = 1.0 if re.search("kernel|GEMV", report.read_gbps) else _kernel(report.quant)
    memory = Memory(kernel * host.cpu, host.link, max(host.link, host.both))
    with_gpu = place.kind != "cpu"
    read = memory.cpu
    if with_gpu:
        card = parts.gpu(report.gpu)
        if card is None:
            raise UnpredictableError(f"GPU '{report.gpu}' is not in the catalogue")
        _fits(report, shape, size, dense, place)
        read = GPU_SHARE * card.memory_gbps
    expert_bytes = size * shape.expert_params
    other = dense * shape.other_params + _context(report.context) * shape.kv_bytes
    return Scenario(
        dense_ns=engine.layer_ns * with_gpu + other / read / shape.layers,
        head_ns=0.0,
        gpu_expert_ns=expert_bytes / read,
        expert_bytes=expert_bytes,
        memory=memory,
        events=_events(report, shape, place, memory, expert_bytes),
        cpu_call_ns=engine.handoff_ns * with_gpu * (IN_A_VM if _in_a_vm(report) else 1.0),
        copy_call_ns=engine.copy_ns,
    ), probed


def lru_share(report: Report) -> tuple[float, parts.Shape]:
    """Return the share of the experts that an LRU cache holds, and the model.

    Raises: UnpredictableError.
    """
    shape = parts.shape(report.model)
    if shape is None:
        raise UnpredictableError(f"model '{report.model}' is not in the catalogue")
    if not re.search(r"LRU|cache", report.engine) or re.search(r"MRS|pin|pooled", report.engine):
        raise UnpredictableError(f"'{report.engine}' is no per-layer LRU cache")
    place = placement(report.budget or report.engine, shape.layers, shape.experts, cached=True)
    if place is None or place.kind != "cache":
        raise UnpredictableError(f"'{report.budget}' does not say how much is cached")
    return place.share, shape


def _in_a_vm(report: Report) -> bool:
    return bool(re.search(r"\bVM\b|vCPU|container|cloud|WSL", f"{report.cpu} {report.ram}"))


def _by_expert(report: Report) -> bool:
    """Return whether a fork keeps single experts of a layer on the GPU."""
    return bool(re.search("hottest|slots|cache|static", f"{report.budget} {report.engine}".lower()))


def _bytes_per_weight(report: Report, shape: parts.Shape) -> tuple[float, float]:
    """Return bytes a weight of routed experts and of all else."""
    known = parts.quant(report.quant)
    size = report.bytes_per_weight or (known[0] if known else None)
    if not size:
        raise UnpredictableError(f"quantisation '{report.quant}' is not in the catalogue")
    dense = known[1] if known else max(0.65, size)
    return size, max(dense, 1.2) if shape.name.startswith("gpt_oss") else dense


def _refuse(report: Report) -> None:
    """Raise what makes a row unpredictable whatever its parts."""
    metric = report.metric.lower()
    if not re.search(A_TIME, metric) or re.search(NO_TIME, metric):
        raise UnpredictableError(f"'{report.metric}' is no time of a token")
    if report.batch not in ("", "1", "1.0"):
        raise UnpredictableError(f"batch '{report.batch}': single streams are predicted")
    if "ssd" in report.elsewhere.lower() or "nvme" in report.engine.lower():
        raise UnpredictableError("experts are read from a disk, which is not modelled")
    if re.match(r"\d+x |2 GPUs|\d+-\d+x ", report.gpu) or "TP" in report.engine:
        raise UnpredictableError("several GPUs are not modelled together with offloading")
    if re.search(r"Apple|phone|Jetson|GB10", f"{report.gpu} {report.cpu}"):
        raise UnpredictableError("its memory is unified: nothing crosses a link")
    system = report.engine.lower()
    for words in NOT_EXACT:
        if words in system:
            raise UnpredictableError("it does not run exactly the router's experts")
    for pattern, why in NOT_MODELLED.items():
        if re.search(pattern, system):
            raise UnpredictableError(why)


def _kernel(quant: str) -> float:
    if re.search(r"IQ|EXL", quant):
        return KERNEL_SHARE["i"]
    return KERNEL_SHARE["k" if re.search(r"Q[2-6]_", quant) else "plain"]


def _host(report: Report, place: Placement, engine: str) -> tuple[Memory, bool]:
    """Return the host's rates, measured or by RAM and CPU, and whether they were measured."""
    card, named = parts.gpu(report.gpu), parts.cpu(report.cpu)
    sockets = 2 if re.search(r"\b2x|dual", report.cpu) else 1
    peak = parts.ram_gbps(report.ram, named)
    if peak is None and named is not None:
        peak = named.memory_gbps
    if peak is not None and named is not None and sockets == 2:
        peak *= TWO_SOCKETS.get(engine, TWO_SOCKETS["other"])
    kind = named.kind if named else "desktop"
    read = parts.READ_SHARE[kind] * peak if peak else None
    measured = re.search(
        r"([\d.]+)(?:-[\d.]+)? *(?:achieved|measured|\(STREAM|read)", report.read_gbps
    )
    if not measured:
        measured = re.search(r"(?:measured|read|achieved)[^\d]*([\d.]+)", report.read_gbps)
    stated_peak = re.match(r"~?([\d.]+)", report.read_gbps)
    if measured:
        read = float(measured[1]) * (TRIAD if "STREAM" in report.read_gbps else 1.0)
    elif stated_peak:
        read = parts.READ_SHARE[kind] * float(stated_peak[1])
    if read is None:
        if place.kind == "resident" or (report.elsewhere == "pcie" and card is not None):
            read = NEVER_SHORT_GBPS
        else:
            raise UnpredictableError(
                "neither CPU nor RAM is named: nothing says how fast the host reads"
            )
    link = parts.link_gbps(card, named) if card else read
    given = re.match(r"([\d.]+)", report.link)
    if given and float(given[1]) > 6:  # below: a generation
        link = float(given[1]) * (PEAK_LINK if float(given[1]) in (16.0, 32.0, 64.0) else 1.0)
    threads = report.threads
    if threads is not None and named is not None and not measured:
        read *= parts.thread_share(named, threads)
    return Memory(read, min(link, read), min(read + link, parts.BOTH_SHARE * read)), bool(measured)


NEVER_SHORT_GBPS = 60.0  # where only copies count: the host is not what limits them
TRIAD = 4 / 3  # bytes on the bus for each that STREAM's triad counts: a store reads its line first
TWO_SOCKETS = {"ktransformers": 1.6, "llama_cpp": 0.6, "other": 1.0}
"""Read rate of two sockets over one's: ktransformers keeps the experts on both, the threads of
llama.cpp read the other's memory (development group kt-v02)."""
PEAK_LINK = 0.8  # of a link's nominal rate


def _fits(report: Report, shape: parts.Shape, size: float, dense: float, place: Placement) -> None:
    share = {"layers": 1 - place.on_cpu / shape.layers, "resident": 1.0}.get(
        place.kind, place.share
    )
    needed = share * shape.layers * shape.experts * shape.expert_params * size
    if report.gpu_gb and needed + dense * shape.other_params > 1.05e9 * report.gpu_gb:
        raise UnpredictableError("the experts said to be on the GPU do not fit it")


def _by_memory(
    report: Report, shape: parts.Shape, size: float, dense: float, cached: bool
) -> Placement | None:
    """Return what fits the memory that is said to hold experts; None where no memory is said."""
    said = report.budget
    if found := re.search(r"(\d+) ?% device memory", said):
        room = float(found[1]) / 100 * (report.gpu_gb or 0.0)
    elif found := re.search(r"\bfit\b.*?(\d+) MB VRAM", said):
        room = float(found[1]) / 1000
    elif found := re.search(r"(\d+) GB total VRAM", said):
        room = float(found[1]) - RESERVED_GB
    elif re.match(r"(?:--)?fit\b", said):
        room = (report.gpu_gb or 0.0) - RESERVED_GB
    else:
        return None
    experts = shape.layers * shape.experts * shape.expert_params * size
    share = min(1.0, max(0.0, 1e9 * room - dense * shape.other_params) / experts)
    if cached:
        return Placement("cache", share=share)
    return Placement("layers", on_cpu=round(shape.layers * (1 - share)))


RESERVED_GB = 1.5  # context, activations and buffers


def _context(text: str) -> float:
    found = re.match(r"(\d+)(?!\w| prose)", text)
    return float(found[1]) if found and "allocated" not in text else 0.0


def _events(
    report: Report, shape: parts.Shape, place: Placement, memory: Memory, size: float
) -> Events:
    layers, top_k = shape.layers, shape.top_k
    streamed = report.elsewhere.startswith("pcie")
    if place.kind == "resident":
        return static_layers(layers, top_k, 0)
    if place.kind == "cpu":
        return static_layers(layers, top_k, layers)
    if place.kind == "layers":
        events = static_layers(layers, top_k, place.on_cpu)
        if not streamed:
            return events
        none = np.zeros_like(events.cpu)
        return Events(none, events.cpu, none, none, events.hits)
    rate = 1 - place.share if place.kind == "share" else lru_misses(place.share, shape.lru)
    if place.kind == "share" and re.search("hottest|popular|profile|frequency", report.budget):
        rate = min(1.0, POPULAR * rate)
    missing = layers * top_k * rate
    split: Split = "table"
    copied = missing if streamed else 0.0
    if "cpu+pcie" in report.elsewhere:
        return stated(layers, top_k, missing=missing, copied=quickest_table(memory, size, top_k))
    return stated(layers, top_k, missing=missing, copied=copied, split=split)


POPULAR = 0.75  # misses of the most popular experts, kept for good, to those of any
