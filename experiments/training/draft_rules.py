"""What drafts are worth on the bundled model, by stop rule (DraftExpert, arXiv 2607.24434).

    python experiments/training/draft_rules.py --data GSM8K --out .work/draft_rules

The first problems of GSM8K test, decoded as the bundled trace `demo` is, by drafts and their
verification, are replayed under `policy=draftexpert` with LLaDA2.0-mini's bytes and times; beside
each row stands plain decoding of the same text under the same policy, which then is LRU with all
misses copied (`inter_iteration`). Recordings in OUT are used again; OUT/table.md holds the table.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from oled.paths import model_path
from oled.record import (
    Drafting,
    LoadedModel,
    Mode,
    SpeculativeBlocks,
    load_model,
    load_prompts,
    record,
)
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace

RULES = {
    "tau 0.8, B 16, 8 states": Drafting(),
    "no draft expert": Drafting(experts=None),
    "tau 0.5, B 16": Drafting(confidence=0.5),
    "tau 0.8, B 48": Drafting(growth=48),
    "always 2 states": Drafting(confidence=0.0, most=2),
    "always 4 states": Drafting(confidence=0.0, most=4),
}
SLOTS = (20, 50)
COLUMNS = {
    "acceptance": "draft_acceptance",
    "states": "states_per_verify",
    "steps": "steps_per_verify",
    "foreseen": "draft_recall",
}


def recorded(loaded: LoadedModel, data: Path, out: Path, rule: Drafting, problems: int) -> Path:
    """A recording under a rule; made where it is not there yet."""
    digest = hashlib.sha256(repr((rule, problems)).encode())
    for name in ("model", "draft"):
        digest.update((model_path() / f"{name}.safetensors").read_bytes())
    folder = out / digest.hexdigest()[:12]
    if not (folder / "trace.json").is_file():
        decode = SpeculativeBlocks(
            block_length=16,
            mode=Mode.FORCED,
            tokens_per_forward=2,
            max_new_tokens=64,
            draft=rule,
        )
        record(loaded, load_prompts(data / "test.jsonl", limit=problems), decode, folder)
    return folder


def cells(subject: PreparedTrace) -> Iterator[str]:
    """Of one recording: how drafting went, then what it cost, by slots."""
    drafts = subject.drafts
    drafts = subject.drafts
    if drafts is None:
        raise ValueError("nothing was drafted")
    yield f"{drafts.drafts / drafts.number:.2f}"
    found: list[dict[str, Any]] = [
        simulate(subject, "draftexpert", slots=slots, geometry="llada2_mini").metrics
        for slots in SLOTS
    ]
    for key in COLUMNS.values():
        value = found[0][key]
        yield "-" if value is None else f"{value:.3f}"
    for one in found:
        yield (
            f"{one['tpot_ns'] / 1e6:.2f} ({one['undrafted_tpot_ns'] / 1e6:.2f}), "
            f"{one['phases']['verify']['hit_rate']:.3f} ({one['undrafted_hit_rate']:.3f}), "
            f"{one['decode_h2d_bytes_per_token'] / 1e6:.0f} "
            f"({one['undrafted_decode_h2d_bytes_per_token'] / 1e6:.0f}), "
            f"{one['relative_verify_cost']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="recordings and the table")
    parser.add_argument("--problems", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = load_model("tiny", "cpu")
    slots = (f"{n} slots: TPOT ms, verify hits, MB a token, verify cost" for n in SLOTS)
    head = ["rule", "drafts a verification", *COLUMNS, *slots]
    lines = [head, ["---"] * len(head)]
    for name, rule in RULES.items():
        folder = recorded(loaded, args.data, args.out, rule, args.problems)
        lines.append([name, *cells(PreparedTrace.of(folder))])
        print(" | ".join(lines[-1]), flush=True)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    (args.out / "table.md").write_text(text)
    print(f"\n{text}\nin brackets: plain decoding of the same text, inter_iteration")


if __name__ == "__main__":
    main()
