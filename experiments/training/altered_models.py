"""What changes of the routed experts cost and save on the bundled model: quality beside time.

    python experiments/training/altered_models.py --data GSM8K

Route-changing rules run twice: in a replay of the unchanged model's trace (open loop: cost only),
and in the model itself (closed loop), whose text, held-out loss and trace are its own. Pruned paths
are closed loop. Times are simulated with LLaDA2.0-mini's experts on the default machine. The table
goes to experiments/results/altered_models/table.md, the figures in full beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from oled.altered.reroute import Reroute
from oled.policies.composition import composition_names, load_composition
from oled.quality.measure import Quality, quality
from oled.record import BlockDiffusion, LoadedModel, Prompt, load_model, load_prompts, record
from oled.record.split_experts import record_split_experts
from oled.running.alteration import Alteration
from oled.running.hooks import replace_experts
from oled.running.modules import moe_layers
from oled.running.rerouting import Rerouting
from oled.sim.api import simulate

RESULTS = Path(__file__).parents[1] / "results" / "altered_models"
TOLERANCES = (0.1, 0.2, 0.3, 0.5)
DECODE = BlockDiffusion(block_length=16, threshold=0.9, max_new_tokens=96)
MACHINE = {"slots": 20, "geometry": "llada2_mini", "references": False}
HELD_OUT = 18  # first lines of test.jsonl are those of the bundled traces

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """The model and what it is measured on."""

    loaded: LoadedModel
    learned: Sequence[Prompt]
    prompts: Sequence[Prompt]
    scratch: Path

    def trace(self, name: str, rule: Reroute | None = None, scores: int = 0) -> Path:
        """Decoded freely, under a rule or not."""
        out = self.scratch / name
        record(self.loaded, self.prompts, DECODE, out, reroute=rule, score_width=scores)
        return out


class Silent(Alteration):
    """A control: routed experts that add nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = moe_layers(model)

    def _install(self, installed: ExitStack) -> None:
        installed.enter_context(
            replace_experts(self._layers, lambda _row, _compute, hidden, *_: hidden * 0)
        )

    def summary(self) -> Row:
        return {}


def silent_row(bench: Bench) -> Row:
    """What the routed experts are worth to the model at all."""
    found = quality(bench.loaded, bench.prompts, DECODE, Silent(bench.loaded.model))
    return {"name": "routed experts silent (control)", **found.summary()}


def replayed(trace: Path, policy: str) -> Row:
    """What people compare of a simulation."""
    metrics = simulate(trace, policy, **MACHINE).metrics
    names = ("tpot_ns", "hit_rate", "h2d_bytes", "accesses")
    return {name: metrics[name] for name in names}


def rules() -> dict[str, Reroute]:
    """Of the policies that change routes."""
    found = ((name, load_composition(name).reroute) for name in composition_names())
    return {name: rule for name, rule in found if rule is not None}


def rule_row(bench: Bench, name: str, rule: Reroute, plain: Path) -> Row:
    """A rule, open and closed."""
    change = Rerouting(bench.loaded.model, rule)
    found = quality(bench.loaded, bench.prompts, DECODE, change)
    return {
        "name": name,
        **change.summary(),
        **found.summary(),
        "open": replayed(plain, name),
        "closed": replayed(bench.trace(name, rule), "inter_iteration"),
    }


def paths_row(bench: Bench, tolerance: float) -> Row:
    """Pruned paths."""
    out = bench.scratch / f"paths-{tolerance}"
    done = record_split_experts(bench.loaded, bench.learned, bench.prompts, DECODE, tolerance, out)
    found: Quality = done.quality
    return {
        "name": f"pcomoe, tolerance {tolerance}",
        **done.split.summary(),
        **found.summary(),
        "closed": replayed(done.trace, "pcomoe"),
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = (
        "model",
        "left of the experts",
        "bits a token more (95 %)",
        "accuracy",
        "same choice",
        "same tokens",
        "tokens a forward",
        "TPOT ms open",
        "TPOT ms",
        "hit rate",
    )
    lines = [head, ("---",) * len(head), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(row: Row) -> tuple[str, ...]:
    """One line of it."""
    if "bits_per_token" not in row:  # the unchanged model
        first = (row["name"], "all", f"0 ({row['bits_per_token_plain']:.3f})")
        rest = (f"{row['accuracy_plain']:.3f}", "1", "1", f"{row['tokens_per_forward_plain']:.2f}")
        return (*first, *rest, "", *times(row["closed"]))
    if "closed" not in row:
        left = "none"
    elif "bytes_share" in row:
        left = f"{row['bytes_share']:.0%} of the bytes"
    else:
        left = f"{row['kept_gate_mass']:.0%} of the gate weight"
    more = [row[f"bits_per_token_more{end}"] for end in ("", "_low", "_high")]
    return (
        row["name"],
        left,
        "{:+.3f} ({:+.3f}…{:+.3f})".format(*more),
        f"{row['accuracy']:.3f}",
        f"{row['same_choice']:.3f}",
        f"{row['same_tokens']:.3f}",
        f"{row['tokens_per_forward']:.2f}",
        f"{row['open']['tpot_ns'] / 1e6:.2f}" if "open" in row else "",
        *times(row.get("closed")),
    )


def times(found: Row | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    return f"{found['tpot_ns'] / 1e6:.2f}", f"{found['hit_rate']:.3f}"


def measure(bench: Bench) -> list[Row]:
    """All rows; the unchanged model first."""
    experts = 1 << 16  # of the scores all: a recorder keeps no more than there are
    plain = bench.trace("plain", scores=experts)
    rows = [rule_row(bench, name, rule, plain) for name, rule in rules().items()]
    rows += [paths_row(bench, tolerance) for tolerance in TOLERANCES]
    rows.append(silent_row(bench))
    own = {key: value for key, value in rows[0].items() if key.endswith("_plain")}
    return [{"name": "unchanged", **own, "closed": replayed(plain, "inter_iteration")}, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's JSONL files")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--learn", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            load_model("tiny", "cpu"),
            load_prompts(arguments.data / "train.jsonl", limit=arguments.learn),
            load_prompts(arguments.data / "test.jsonl", skip=HELD_OUT, limit=arguments.prompts),
            Path(scratch),
        )
        rows = measure(bench)
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = f"{datetime.now(UTC):%Y-%m-%d}, {arguments.prompts} prompts of GSM8K test"
    (RESULTS / "rows.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "table.md").write_text(f"{about}\n\n{table(rows)}\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
