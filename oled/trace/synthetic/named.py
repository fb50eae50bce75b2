"""Synthetic traces by what they describe: a shape, a block length, a process, a workload, a seed.

Each is generated once into a folder of its own name and read from there afterwards; the name says
`synthetic`, and so does every result that was made from it.

Lengths are means at four characters a token, prompts with a chat template of 20 tokens. GSM8K: a
test question has 240 characters, its solution 293, of which an answer that reasons aloud is assumed
to need twice as many. HumanEval: a prompt has 451 characters and its solution 181; an answer is
assumed to repeat the prompt, with a few words around it. GPQA-Diamond: a question with its options
has about 690 bytes (198 in 136,544, card of a formatted copy); its output is assumed. Requests of
one trace are equally long, in whole blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from oled.atomic import whole_folder
from oled.errors import UserError, nearest
from oled.models.catalogue import ModelGeometry, model_geometry
from oled.trace.schema import Geometry
from oled.trace.synthetic.decode import Decoding
from oled.trace.synthetic.generate import write_synthetic
from oled.trace.synthetic.process import LAYERED, Process
from oled.trace.synthetic.requests import Workload

PROCESSES = {"even": Process(), "uneven": LAYERED}
"""Layers that differ little, and layers that differ strongly."""
LENGTHS = {"gsm8k": (80, 160), "humaneval": (133, 192), "gpqa": (192, 512)}
"""Tokens of prompt and output."""
DECODINGS = {
    "llada2": Decoding(),
    "llada2_1_quality": Decoding(threshold=0.7, edit_threshold=0.5),
    "llada2_1_speed": Decoding(threshold=0.5, edit_threshold=0.0),
    "autoregressive": None,
}
"""LLaDA2.0's threshold; LLaDA2.1's two, by which tokens are also written anew. Which thresholds its
modes have is our reading: quality those of diffusers' example, speed those of SGLang's
`JointThreshold`; both with up to 16 more forwards for edits. None: token by token."""
GROUPED = ("llada2_mini", "llada2_flash")
"""Shapes whose router takes sigmoids and first limits a token to half of its groups of experts; the
others' takes the softmax of the chosen."""
VERSION = 3
"""Of the generator: a change of what a seed gives needs another number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Synthetic:
    """One synthetic trace; the fields are the keys of `trace=synthetic`."""

    geometry: str = "llada2_mini"
    block_length: int = 16
    requests: int = 8
    process: str = "even"
    workload: str = "gsm8k"
    decoding: str = "llada2"
    seed: int = 0  # the requests
    model_seed: int = 0  # the made-up model: projections and popularity
    horizons: int = 0  # next-gate predictions
    scores: int = 0  # router scores kept of each token, the best ones

    def __post_init__(self) -> None:
        model_geometry(self.geometry)
        for value, known, key in (
            (self.process, PROCESSES, "process"),
            (self.workload, LENGTHS, "workload"),
            (self.decoding, DECODINGS, "decoding"),
        ):
            if value not in known:
                raise UserError(f"trace.{key}: there is no '{value}'; {nearest(value, known)}")
        for number, least, key in (
            (self.block_length, 1, "block_length"),
            (self.requests, 1, "requests"),
            (self.horizons, 0, "horizons"),
            (self.scores, 0, "scores"),
        ):
            if isinstance(number, bool) or number < least:
                raise UserError(f"trace.{key}={number}: it must be a number of at least {least}")

    @property
    def name(self) -> str:
        """Says everything that makes the trace."""
        decoding = f"-{self.decoding}" if self.decoding != "llada2" else ""
        predictions = f"-h{self.horizons}" if self.horizons else ""
        scores = f"-scores{self.scores}" if self.scores else ""
        return (
            f"synthetic-{self.geometry}-b{self.block_length}-{self.process}-{self.workload}"
            f"{decoding}-r{self.requests}-s{self.seed}-m{self.model_seed}{predictions}{scores}"
        )

    def workload_of(self) -> Workload:
        """Return the workload, its lengths in whole blocks."""
        prompt, output = LENGTHS[self.workload]
        return Workload(
            requests=self.requests,
            prompt_blocks=-(-prompt // self.block_length),
            blocks=-(-output // self.block_length),
            block_length=self.block_length,
            decoding=DECODINGS[self.decoding],
            horizons=self.horizons,
            scores=self.scores,
        )

    def process_of(self) -> Process:
        """Return the process with the geometry's router; SDAR-30B's meets TEAM's figures of it."""
        process = PROCESSES[self.process]
        if self.geometry in GROUPED:
            return process
        flat = dataclasses.replace(process, groups=1, kept_groups=1, softmax=True, weight_sum=1.0)
        if self.geometry != "sdar_30b":
            return flat
        return dataclasses.replace(
            flat, popularity=0.85 * flat.popularity, confidence_base=flat.confidence_base + 0.9
        )

    def calibration(self) -> Synthetic:
        """Return other requests of the same model, for policies that learn beforehand."""
        return dataclasses.replace(self, seed=self.seed + 1000, requests=min(self.requests, 8))

    def folder(self) -> Path:
        """Return the trace's folder, generated where it is not there yet."""
        folder = _home() / self.name
        if (folder / "trace.json").is_file():
            return folder
        with contextlib.suppress(FileExistsError), whole_folder(folder) as made:
            write_synthetic(  # unless another process is faster
                made,
                geometry_of(model_geometry(self.geometry)),
                self.workload_of(),
                self.process_of(),
                seed=self.seed,
                model_seed=self.model_seed,
            )
        return folder


def geometry_of(model: ModelGeometry) -> Geometry:
    """Return the shape of a model as a trace describes it."""
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
    """Return `$OLED_CACHE` or the user's cache folder."""
    base = os.environ.get("OLED_CACHE")
    root = Path(base) if base else Path.home() / ".cache" / "oled"
    return root / f"traces-{VERSION}"
