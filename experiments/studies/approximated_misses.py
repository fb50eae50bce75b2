"""What becomes of logits and text where SPICE gives misses up: surrogates beside nothing.

    python experiments/studies/approximated_misses.py --data ../shared/data/prompts/gsm8k

The bundled model runs live with `heads=bundled` under `policy=spice`, with several shares of the
gate mass that may be given up; `oled.quality.approximated` says what is compared. The table goes to
experiments/results/approximated_misses/table.md, the figures in full beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oled.hardware import load_profile, load_runtime
from oled.live.decoded import LiveRun
from oled.live.run import Machine, live_run
from oled.models.catalogue import model_geometry
from oled.policies.composition import Composition, load_composition
from oled.policies.dispatch.approximate import Approximate
from oled.quality.approximated import Exact, Live, approximations
from oled.record import BlockDiffusion, LoadedModel, Prompt, load_model, load_prompts
from oled.sim.settings import Settings

RESULTS = Path(__file__).parents[1] / "results" / "approximated_misses"
DECODE = BlockDiffusion(block_length=16, threshold=0.9, max_new_tokens=64)
HELD_OUT = 18  # first lines of test.jsonl are those of the bundled traces
POINTS = ((0.03, 20), (0.1, 20), (0.3, 20), (0.1, 50))
"""Share that may be given up, and slots a layer."""

Row = dict[str, Any]


def driver(loaded: LoadedModel, prompts: Sequence[Prompt], settings: Settings) -> Live:
    """Run the model with LLaDA2.0-mini's costs, by which misses are copied or computed."""
    machine = Machine(
        load_profile("rtx5090_xeon8470q"),
        load_runtime("graph_fused"),
        model_geometry("llada2_mini"),
    )

    def live(policy: Composition, loop: Any, stand_in: bool) -> LiveRun:
        known = (policy, settings, machine)
        return live_run(loaded, prompts, loop, *known, heads="bundled", stand_in=stand_in)

    return live


def measure(data: Path, prompts: int) -> Iterator[Row]:
    """Measure a row for each point and what stands in."""
    loaded = load_model("tiny", "cpu")
    asked = load_prompts(data / "test.jsonl", skip=HELD_OUT, limit=prompts)
    exact = None
    for share, slots in POINTS:
        composition = replace(load_composition("spice"), dispatch=Approximate(share=share))
        live = driver(loaded, asked, Settings(slots=slots))
        if exact is None:  # the same with any cache
            exact = Exact.of(loaded, asked, DECODE, live)
        free = live(composition, DECODE, True)
        for name, found in approximations(exact, composition, live, free).items():
            yield {"share": share, "slots": slots, "stands_in": name, **found.summary()}


def table(rows: list[Row]) -> str:
    """Write the rows as Markdown."""
    head = ("share", "slots", "stands in", "given up", "KL bits", "same choice")
    lines = [(*head, "bits a token more (95 %)", "same tokens"), ("---",) * 8, *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one line."""
    more = [row[f"bits_per_token_more{end}"] for end in ("", "_low", "_high")]
    return (
        f"{row['share']:g}",
        str(row["slots"]),
        row["stands_in"],
        f"{row['dropped_gate_share']:.3f}",
        f"{row['kl_bits']:.4f}",
        f"{row['same_choice']:.3f}",
        "{:+.4f} ({:+.4f}…{:+.4f})".format(*more),
        f"{row['same_tokens']:.3f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's JSONL files")
    parser.add_argument("--prompts", type=int, default=8)
    arguments = parser.parse_args()
    rows = list(measure(arguments.data, arguments.prompts))
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d}, {arguments.prompts} prompts of GSM8K test, "
        f"{rows[0]['masked_tokens']} open positions, {rows[0]['bits_per_token_plain']:.4f} bits a "
        f"token exact"
    )
    (RESULTS / "rows.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "table.md").write_text(f"{about}\n\n{table(rows)}\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
