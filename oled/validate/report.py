"""A validation's report on disk and in words."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.results import write_json

REPORT = "report.json"


def write(report: Mapping[str, Any], out: Path) -> list[Path]:
    """OUT/report.json and the scatter beside it."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / REPORT, report)
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph
    figure = importlib.import_module("oled._plots.validate").draw(report)
    saved = importlib.import_module("oled._plots.style").save(figure, out, "validate")
    return [out / REPORT, *saved]


def text(report: Mapping[str, Any]) -> str:
    """The report in words: a line a configuration, then the figures and the verdict."""
    lines = [
        f"{'policy':18} {'slots':>7} {'live ms':>9} {'sim ms':>9} {'TPOT':>8} {'P95':>7} "
        f"{'calm':>5}  decisions outputs"
    ]
    for row in report["configurations"]:
        lines.append(
            f"{row['policy']:18} {row['slots']!s:>7} {_ms(row['live_tpot_ns']):>9} "
            f"{_ms(row['simulated_tpot_ns']):>9} {_share(row['tpot_error'], '+'):>8} "
            f"{_share(row['forward_error_p95_abs']):>7} {row['undisturbed_share']:5.0%}  "
            f"{_same(row['decisions_identical']):9} {_same(row['outputs_identical'])}"
        )
    decide = max(row["decide_ns_per_forward"] for row in report["configurations"])
    spearman = report["ranking_spearman"]
    lines += [
        f"{report['layer_steps']} layer-steps of {report['forwards']} forwards a run, "
        f"{report['hardware']} in {report['dilation']:g} times slow motion",
        f"TPOT error: median {_share(report['tpot_error_median_abs'])}, "
        f"at most {_share(report['tpot_error_max_abs'])}; "
        f"P95 of forwards at most {_share(report['forward_error_p95_abs'])}",
        f"ranking: Spearman {'-' if spearman is None else f'{spearman:.3f}'}, "
        f"worst swap {report['ranking_worst_swap']:.1%}",
        f"deciding takes up to {decide / 1e3:.0f} us a forward (measured; what the clock charges "
        f"is put in)",
        f"undisturbed forwards: {report['undisturbed_share']:.0%}",
        *report["reasons"],
        f"verdict: {_VERDICTS[report['verdict']]}"
        + ("" if report["paced"] else " (decisions and outputs only: no times were kept)"),
    ]
    return "\n".join(lines)


_VERDICTS = {
    "pass": "pass",
    "fail": "fail",
    "busy": "busy: this machine disturbed too many forwards to judge the clock",
}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3f}"


def _share(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2%}"


def _same(same: bool) -> str:
    return "identical" if same else "DIFFER"
