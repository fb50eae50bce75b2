"""Split a model's experts: prune, measure, and record the model on the paths that are left."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oled.altered.split import write_split_trace
from oled.errors import UserError
from oled.quality.measure import Quality, quality
from oled.quality.pruning import prune_paths
from oled.quality.split_experts import SplitExperts, save_paths
from oled.record.run import RecordReport, record
from oled.running.decode import BlockDiffusion, Decoding, Speculative
from oled.running.loading import LoadedModel
from oled.running.prompts import Prompt, tokenize
from oled.running.threads import threads_for


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The split experts, their quality, and where paths and trace were written."""

    split: SplitExperts
    quality: Quality
    recorded: RecordReport
    paths: Path
    trace: Path


def record_split_experts(
    loaded: LoadedModel,
    learned: Sequence[Prompt],
    prompts: Sequence[Prompt],
    decode: Decoding,
    tolerance: float,
    out: Path,
    *,
    chat: bool | None = None,
    free: bool = True,
    seed: int = 0,
) -> SplitReport:
    """Prune on the prompts `learned`; measure the model on the others and let it decode them.

    Writes OUT/paths.npz and OUT/trace, whose text is that of the pruned model.
    """
    if not isinstance(decode, BlockDiffusion) or isinstance(decode, Speculative):
        raise UserError("paths are pruned by a block-diffusion loss: use decode=block_diffusion")
    known = {prompt.sha256 for prompt in learned}
    if any(prompt.sha256 in known for prompt in prompts):
        raise UserError(
            "learn.prompts and prompts share a prompt: choose others with skip= and limit="
        )
    settings = decode.resolve(loaded.model, loaded.tokenizer)
    with threads_for(loaded.model):
        requests = tokenize(learned, loaded.tokenizer, chat=chat)
        pruned = prune_paths(loaded.model, requests, settings, tolerance, seed=seed)
    split = SplitExperts(loaded.model, pruned)
    found = quality(loaded, prompts, decode, split, chat=chat, free=free, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder, split:
        whole = Path(folder) / "trace"
        recorded = record(loaded, prompts, decode, whole, chat=chat, seed=seed)
        trace = write_split_trace(whole, out / "trace", pruned.plan)
    return SplitReport(split, found, recorded, save_paths(pruned, out / "paths.npz"), trace)
