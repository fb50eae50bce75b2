"""Declare the keys of every verb that takes key=value; those of a simulation are in `oled.sim`.

From these follow `--help`, the schema that Hydra composes against (`oled.cli.schema`) and what the
plain verbs accept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from oled.keys import REQUIRED, Key, key, keys_of
from oled.sim.settings import INPUTS, SETTINGS

NAMED = {one.name: one for one in (*INPUTS, *SETTINGS)}


@dataclass
class Demo:
    out: str = key("demo-out", "where everything goes", shown="DIR")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "where the model runs")


@dataclass
class Model:
    model: dict[str, Any] = key(
        "tiny",
        "the bundled model, a checkpoint, or one on the hub",
        shown="tiny|FOLDER|OWNER/NAME",
        group=True,
    )
    path: str = key(REQUIRED, "the same, written out", name="model.path", shown="FOLDER")
    revision: str | None = key(
        None, "branch, tag or commit on the hub", name="model.revision", shown="NAME"
    )
    trust_remote_code: bool = key(
        False, "code that comes with the checkpoint may run here", name="model.trust_remote_code"
    )
    dtype: str = key(
        "auto",
        "auto: of the checkpoint, float32 on a CPU",
        name="model.dtype",
        shown="auto|float32|bfloat16|float16",
    )
    device: str = key(
        "auto", "auto: cuda where there is one", name="model.device", shown="cpu|cuda"
    )


@dataclass
class Prompts:
    prompts: str | None = key(
        None, "JSONL: GSM8K's fields, HumanEval's, or `prompt` and `reference`", shown="FILE"
    )
    skip: int = key(0, "prompts to leave out from the start", least=0)
    limit: int | None = key(None, "how many prompts; default: all", shown="N", least=1)
    chat: bool | None = key(
        None, "through the tokenizer's chat template; default: where it has one", shown="true|false"
    )


@dataclass
class Decoding:
    decode: Any = key(
        "block_diffusion",
        "and any key of its file, as decode.threshold=0.9 decode.max_new_tokens=64",
        shown="NAME",
        group=True,
    )


RULE = "one that changes routes (des_seq, des_vote, block_pool)"


@dataclass
class Record:
    policy: dict[str, Any] | None = key(None, RULE, shown="NAME|FILE.yaml", group=True)
    batch_size: int = key(1, "prompts at once", least=1)
    horizons: int = key(0, "also next-gate predictions of so many layers ahead", least=0)
    score_width: int = key(0, "also so many of the best router scores", least=0)
    heads: str | None = key(None, "also what trained predictors say", shown="bundled|FILE")
    seed: int = key(0, "of canvases")


@dataclass
class Quality:
    policy: dict[str, Any] | None = key(None, RULE, shown="NAME|FILE.yaml", group=True)
    paths: str | None = key(None, "or what oled paths has made of the experts", shown="FILE.npz")
    free: bool = key(True, "also let both models decode freely; false: the loss alone")
    seed: int = key(0, "of the noise")


@dataclass
class Paths:
    prompts_to_learn: str | None = key(
        None,
        "JSONL with answers, on which paths are judged and refit",
        name="learn.prompts",
        shown="FILE",
    )
    skip_to_learn: int = key(0, "prompts of it to leave out", name="learn.skip", least=0)
    limit_to_learn: int | None = key(64, "how many of it", name="learn.limit", least=1)
    tolerance: float = key(0.3, "what a path may lose of its expert's squared output")
    trace: dict[str, Any] | None = key(
        None,
        "instead of a model: made-up paths for a trace",
        shown="NAME|DIR|synthetic",
        group=True,
    )
    share: float = key(0.5, "of a trace: the expansions kept, at random")
    free: bool = key(True, "also let both models decode freely; false: the loss alone")
    seed: int = key(0, "of the noise, or of made-up paths")


@dataclass
class Link:
    link: str = key(
        "memory", "of backend=cpu; storage reads a file past the page cache", shown="memory|storage"
    )
    expert_file: str | None = key(
        None, "of link=storage: made where it is missing, and kept", shown="FILE"
    )


@dataclass
class Run:
    trace: dict[str, Any] | None = key(
        None,
        "instead of a model: its routing with random weights",
        shown="NAME|DIR|synthetic",
        group=True,
    )
    policy: dict[str, Any] = key("oled", "and any part of it", shown="NAME|FILE.yaml", group=True)
    backend: str = key(
        "emulated",
        "threads that keep a profile's times, threads that keep none, a GPU",
        shown="emulated|cpu|cuda",
    )
    paced: bool = key(False, "jobs last as long as on hardware=NAME (cost.geometry=NAME)")
    forwards: int | None = key(None, "of a trace; default: all", shown="N", least=1)
    heads: str | None = key(
        None,
        "trained predictors and surrogates, for policies that use them",
        shown="bundled|FILE",
    )
    quality: bool = key(True, "of a policy that gives misses up: also what becomes of the text")
    timeline: str | None = key(
        None, "live and simulated side by side; opens in Perfetto", shown="FILE.json.gz"
    )


@dataclass
class Validate:
    preset: Literal["short", "full"] = key("short", "45 seconds, or a quarter of an hour")
    policies: list[str] | None = key(None, "default: the preset's", shown="[lru,oled]")
    hardware: dict[str, Any] = key(
        "rtx4090_desktop", "whose times the lanes keep", shown="NAME|FILE.yaml", group=True
    )
    runtime: dict[str, Any] = key(
        "emulated", "what the software adds", shown="NAME|FILE.yaml", group=True
    )
    dilation: float = key(3.0, "in slow motion", name="pace.dilation")
    kept: bool = key(True, "false: no times are kept, no gate", name="pace.kept")
    gated: bool = key(True, "false: decisions and outputs alone decide")
    repeats: int = key(3, "of every configuration", least=1)
    forwards: int | None = key(None, "of the trace; default: the preset's", shown="N", least=1)
    backend: str = key(
        "emulated",
        "cpu, cuda: experts of cost.geometry's size; hardware=FILE of oled profile",
        shown="emulated|cpu|cuda",
    )


@dataclass
class Profile:
    model: str = key("tiny", "whose experts are measured (oled list models); no weights needed")
    top_k: int | None = key(
        None, "of the routing that is to be replayed; default: the model's", shown="N", least=1
    )
    backend: str = key("emulated", "which lanes are measured", shown="emulated|cpu|cuda")
    link: str = key(
        "memory", "of backend=cpu; storage reads a file beside out", shown="memory|storage"
    )
    out: str = key(REQUIRED, "the file to write, for hardware=FILE.yaml", shown="FILE.yaml")


@dataclass
class Fit:
    model: str = key(REQUIRED, "see oled list models", shown="NAME")
    gpu_memory: str = key(REQUIRED, "of the GPU", shown="24GiB")
    host_memory: str = key(REQUIRED, "of the host", shown="64GiB")
    context: int = key(REQUIRED, "tokens", shown="4096")
    batch_size: int = key(1, "requests at once")
    staging: int = key(8, "slots that transfers land in")
    trace: str | None = key(
        None, "also which experts it uses most, and how much of its routing", shown="NAME|DIR"
    )
    out: str | None = key(None, "all of it, with every expert that stays", shown="FILE.json")


@dataclass
class Sweep:
    """Set how a sweep runs; with -m as with `oled sweep`. Hydra calls them `hydra.launcher.*`."""

    resume: bool = key(False, "compute only what is missing in out=DIR")
    backend: str = key(
        "loky",
        "processes of this machine, or a cluster",
        name="sweep.backend",
        shown="loky|dask|ray",
    )
    workers: int | None = key(
        None, "how many; default: one a core", name="sweep.workers", shown="N", least=1
    )
    address: str | None = key(
        None, "of a running Dask scheduler or Ray head", name="sweep.address", shown="HOST:PORT"
    )


@dataclass
class Reproduce:
    out: str = key("experiments/results", "where studies go", shown="DIR")


def _of(*names: str) -> tuple[Key, ...]:
    """Return keys of a simulation for another verb."""
    return tuple(NAMED[name] for name in names)


def _with(keys: tuple[Key, ...], defaults: dict[str, Any]) -> tuple[Key, ...]:
    """Return the keys, some of them with another default."""
    return tuple(replace(one, default=defaults.get(one.name, one.default)) for one in keys)


LIVE = _of(
    *(name for name in NAMED if name.startswith(("cache.", "cost."))),
    "workload.batch_size",
    "calibration",
    "seed",
)
MODEL = (*keys_of(Model), *keys_of(Prompts), *keys_of(Decoding))
WITHOUT_CHAT = tuple(one for one in MODEL if one.name != "chat")

KEYS: dict[str, tuple[Key, ...]] = {
    "demo": keys_of(Demo),
    "record": (*_with(MODEL, {"prompts": REQUIRED}), *keys_of(Record)),
    "simulate": (*INPUTS, *SETTINGS),
    "run": (
        *_with(WITHOUT_CHAT, {"limit": 2}),
        *keys_of(Run),
        *keys_of(Link),
        *_of("hardware", "runtime"),
        *LIVE,
    ),
    "validate": (
        *_of("trace"),
        *keys_of(Validate),
        *keys_of(Link),
        *_with(LIVE, {"cache.slots": None, "cost.geometry": "llada2_mini"}),
    ),
    "quality": (*MODEL, *keys_of(Quality)),
    "paths": (*MODEL, *keys_of(Paths)),
    "profile": keys_of(Profile),
    "fit": keys_of(Fit),
    "sweep": keys_of(Sweep),
    "reproduce": (*keys_of(Reproduce), *keys_of(Sweep)),
}
"""The keys of every verb, in the order of its help."""

OUT = Key("out", "out", str, None, "where files go; default: a new folder in outputs/", "DIR")
"""A key of every verb that Hydra composes."""

COMPOSED = ("record", "simulate", "run", "validate", "quality", "paths")
"""The verbs whose configuration Hydra composes."""
