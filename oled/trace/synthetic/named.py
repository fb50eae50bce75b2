"""Synthetic traces by what they describe: a shape, a block length, a process, a workload, a seed.

Each is generated once into a folder of its own name and read from there afterwards; the name says
`synthetic`, and so does every result that was made from it.

Lengths of the workloads are means: of GSM8K's test questions (240 characters) and HumanEval's
prompts (451 characters) at four characters a token plus a chat template of 20 tokens; GPQA's
prompt, and all three output lengths, are assumed. Requests of one trace are equally long.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

from oled.errors import UserError, nearest
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.trace.schema import Geometry
from oled.trace.synthetic.generate import Workload, write_synthetic
from oled.trace.synthetic.process import LAYERED, Process

PROCESSES = {"even": Process(), "uneven": LAYERED}
"""Layers that differ little, and layers that differ strongly."""
LENGTHS = {"gsm8k": (80, 160), "humaneval": (133, 192), "gpqa": (224, 512)}
"""Tokens of prompt and output."""
GROUPED = ("llada2_mini", "llada2_flash")
"""Shapes whose router first limits a token to half of its groups of experts."""
VERSION = 1
"""Of the generator: a change of what a seed gives needs another number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Synthetic:
    """One synthetic trace; the fields are the keys of `trace=synthetic`."""

    geometry: str = "llada2_mini"
    block_length: int = 16
    requests: int = 8
    process: str = "even"
    workload: str = "gsm8k"
    seed: int = 0  # the requests
    model_seed: int = 0  # the made-up model: projections and popularity
    horizons: int = 0  # next-gate predictions
    scores: bool = False  # router scores of all experts

    def __post_init__(self) -> None:
        model_geometry(self.geometry)
        for value, known, key in (
            (self.process, PROCESSES, "process"),
            (self.workload, LENGTHS, "workload"),
        ):
            if value not in known:
                raise UserError(f"trace.{key}: there is no '{value}'; {nearest(value, known)}")
        for number, key in ((self.block_length, "block_length"), (self.requests, "requests")):
            if number < 1:
                raise UserError(f"trace.{key}={number}: it must be at least 1")

    @property
    def name(self) -> str:
        """Says everything that makes the trace."""
        side = (f"-h{self.horizons}" if self.horizons else "") + ("-scores" if self.scores else "")
        return (
            f"synthetic-{self.geometry}-b{self.block_length}-{self.process}-{self.workload}"
            f"-r{self.requests}-s{self.seed}-m{self.model_seed}{side}"
        )

    def workload_of(self) -> Workload:
        """Lengths in whole blocks."""
        prompt, output = LENGTHS[self.workload]
        return Workload(
            requests=self.requests,
            prompt_blocks=-(-prompt // self.block_length),
            blocks=-(-output // self.block_length),
            block_length=self.block_length,
            horizons=self.horizons,
            scores=model_geometry(self.geometry).num_experts if self.scores else 0,
        )

    def process_of(self) -> Process:
        """The process, with the router of the geometry."""
        process = PROCESSES[self.process]
        if self.geometry in GROUPED:
            return process
        return dataclasses.replace(process, groups=1, kept_groups=1, weight_sum=1.0)

    def calibration(self) -> Synthetic:
        """Other requests of the same model, for policies that learn beforehand."""
        return dataclasses.replace(self, seed=self.seed + 1000, requests=min(self.requests, 8))

    def folder(self) -> Path:
        """The trace's folder, generated where it is not there yet."""
        folder = _home() / self.name
        if (folder / "trace.json").is_file():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            made = Path(scratch) / self.name
            write_synthetic(
                made,
                geometry_of(model_geometry(self.geometry)),
                self.workload_of(),
                self.process_of(),
                seed=self.seed,
                model_seed=self.model_seed,
            )
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                shutil.rmtree(made)
        return folder


def geometry_of(model: ModelGeometry) -> Geometry:
    """The shape of a model as a trace describes it."""
    layers = len(model.moe_layers)
    return Geometry(
        moe_layers=model.moe_layers,
        experts_per_layer=(model.num_experts,) * layers,
        top_k=model.top_k,
        expert_bytes=(model.expert_bytes,) * layers,
        num_layers=model.num_layers,
        shared_experts=model.shared_experts,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe_intermediate_size,
        name=model.name,
    )


def _home() -> Path:
    """`$OLED_CACHE` or the user's cache folder."""
    base = os.environ.get("OLED_CACHE")
    root = Path(base) if base else Path.home() / ".cache" / "oled"
    return root / f"traces-{VERSION}"
