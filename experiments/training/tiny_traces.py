"""Record what training and diffusion change: small traces of the bundled model's relatives.

    python experiments/training/tiny_traces.py --data GSM8K --out .work/traces \\
        --twin .work/twin \\
        --checkpoints early=.work/first/checkpoint.pt late=.work/tiny/checkpoint.pt

The same held-out problems each time, along their reference answers: `untrained` (the weights that
training began with), the checkpoints by their names (ends of the two runs of `train_tiny.py`), and
`twin` (the same shape, trained and decoded autoregressively: `--recipe twin`).
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from tiny_recipe import Recipe, initial_model, tiny_config
from tiny_twin import CausalTwin
from transformers import PreTrainedTokenizerFast

from oled.models.llada2 import LLaDA2MoeModelLM
from oled.record import Autoregressive, BlockDiffusion, LoadedModel, Mode, load_prompts, record

log = logging.getLogger("tiny_traces")
PROMPTS, SKIP, NEW_TOKENS = 4, 30, 64  # problems that neither demo, calibration nor card use
DIFFUSION = BlockDiffusion(
    block_length=16, mode=Mode.FORCED, tokens_per_forward=2, max_new_tokens=NEW_TOKENS
)
CAUSAL = Autoregressive(mode=Mode.FORCED, max_new_tokens=NEW_TOKENS)


def checkpoint(file: Path, model: LLaDA2MoeModelLM) -> LLaDA2MoeModelLM:
    """The model with the weights of a training run."""
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return model


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--checkpoints", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--twin", type=Path, required=True, help="folder of the twin's run")
    parser.add_argument("--out", type=Path, required=True, help="a folder a trace goes there")
    args = parser.parse_args()
    recipe = Recipe()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.twin / "tokenizer")
    prompts = load_prompts(args.data / "test.jsonl", skip=SKIP, limit=PROMPTS)
    models = {"untrained": initial_model(recipe)}
    for given in args.checkpoints:
        name, _, file = given.partition("=")
        models[name] = checkpoint(Path(file), initial_model(recipe))
    models["twin"] = checkpoint(args.twin / "checkpoint.pt", CausalTwin(tiny_config(recipe)))
    for name, model in models.items():
        stored = torch.float16  # as the bundled model is, so that experts are as large
        loaded = LoadedModel(f"tiny-{name}", model.eval(), tokenizer, stored)
        decode = CAUSAL if name == "twin" else DIFFUSION
        log.info("%s", record(loaded, prompts, decode, args.out / name))


if __name__ == "__main__":
    main()
