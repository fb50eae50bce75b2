"""Turn the last checkpoint of `train_tiny.py` into the bundled model.

    python experiments/training/export_tiny.py --run .work/tiny

Writes weights (fp16, the published per-expert layout), config and tokenizer to `oled/models/tiny`,
and the training log to `experiments/results/tiny_model`; with `--out DIR` all of it to that folder.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

import torch
from tiny_recipe import Recipe, initial_model
from transformers import PreTrainedTokenizerFast

from oled.paths import model_path

log = logging.getLogger("export_tiny")
RESULTS = Path(__file__).parents[1] / "results" / "tiny_model"


def export(run: Path, folder: Path, checkpoint: str = "checkpoint.pt") -> None:
    """Write the model of a training run to `folder`, without anything else of the run."""
    state = torch.load(run / checkpoint, weights_only=True)
    model = initial_model(Recipe())
    model.load_state_dict(state["model"])
    for parameter in model.parameters():  # not the routers' selection biases: they stay fp32
        parameter.data = parameter.data.half()
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner only
    size = sum(file.stat().st_size for file in folder.iterdir())
    log.info("step %d, %.2f MB in %s", state["step"], size / 1e6, folder)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, help="in place of the package's folders")
    args = parser.parse_args()
    results = args.out or RESULTS
    export(args.run, args.out or model_path())
    results.mkdir(parents=True, exist_ok=True)
    for name in ("train_log.jsonl", "recipe.json"):
        shutil.copy(args.run / name, results / name)


if __name__ == "__main__":
    main()
