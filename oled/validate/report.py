"""A validation's report on disk and in words."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oled.results.table import write_json
from oled.validate.judge import LANES, PERCENTILES

REPORT, WORDS = "report.json", "report.txt"


def write(report: Mapping[str, Any], out: Path) -> list[Path]:
    """Write OUT/report.json, the same in words, and the scatter."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / REPORT, report)
    (out / WORDS).write_text(f"{text(report)}\n", encoding="utf-8")
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells of every glyph
    figure = importlib.import_module("oled.bundled.plots.validate").draw(report)
    saved = importlib.import_module("oled.bundled.plots.style").save(figure, out, "validate")
    return [out / REPORT, out / WORDS, *saved]


def text(report: Mapping[str, Any]) -> str:
    """Return the report in words: definitions, two lines a configuration, figures, verdict."""
    rows = report["configurations"]
    spearman = report["ranking_spearman"]
    decide_ns = max(row["decide_ns_per_forward"] for row in rows)
    return "\n".join(
        [
            *report["definitions"],
            "",
            f"{report['layer_steps']} layer-steps of {report['forwards']} forwards of trace "
            f"{report['trace']} a run; {report['hardware']} in {report['dilation']:g} times slow "
            f"motion; TPOT in ms, live above simulated",
            _HEAD,
            *(line for row in rows for line in _lines(row)),
            "",
            f"TPOT error: median {_share(report['tpot_error_median_abs'])}, at most "
            f"{_share(report['tpot_error_max_abs'])}; P95 of forwards at most "
            f"{_share(report['forward_error_p95_abs'])}",
            *_real_clock(report),
            f"ranking: Spearman {'-' if spearman is None else f'{spearman:.3f}'}, worst swap "
            f"{report['ranking_worst_swap']:.1%}",
            f"deciding takes up to {decide_ns / 1e3:.0f} us a forward, from the ids on (wall; the "
            f"clock charges what the runtime preset says)",
            f"undisturbed forwards: {report['undisturbed_share']:.0%}; load "
            f"{report['machine']['load_average']}, scheduling: {report['machine']['scheduling']}",
            *report["labels"],
            *report["reasons"],
            f"verdict: {_VERDICTS[report['verdict']]}"
            + ("" if report["gated"] else " (of decisions and outputs only)"),
        ]
    )


def _real_clock(report: Mapping[str, Any]) -> list[str]:
    """Errors of prefill and decode, and the load of others, where lanes keep no times."""
    if "prefill_error_median_abs" not in report:
        return []
    rows = report["configurations"]
    lines = [
        f"clock without pacing, {name}: median error {_share(report[f'{key}_median_abs'])}, P95 "
        f"{_share(report[f'{key}_p95_abs'])}; by configuration "
        + " ".join(_share(row.get(key), "+", 1) for row in rows)
        for name, key in (("prefill", "prefill_error"), ("decode", "tpot_error"))
    ]
    load = report["other_load"]
    if load is not None:
        lines.append(
            f"other processes took {load['others']:.0%} of the CPUs, others' systems "
            f"{load['stolen']:.0%}"
        )
    return lines


_HEAD = (
    f"{'policy':18} {'slots':>5} {'mean':>8} {'P50':>8} {'P95':>8} {'P99':>8} {'error':>7} "
    f"{'fwd P95':>7} {'gpu':>6} {'h2d':>6} {'d2h':>6} {'cpu':>6} {'calm':>5} {'alike':>5}  same"
)


def _lines(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return two lines of a configuration: live times and errors, simulated times."""

    def times(side: str) -> str:
        keys = (f"{side}_tpot_ns", *(f"{side}_tpot_ns_{name}" for name in PERCENTILES))
        return " ".join(f"{_ms(row[key]):>8}" for key in keys)

    lanes = " ".join(f"{_share(row[f'work_error_{lane}'], '+', 1):>6}" for lane in LANES)
    same = row["decisions_identical"] and row["outputs_identical"]
    return (
        f"{row['policy']:18} {row['slots']!s:>5} {times('live')} "
        f"{_share(row['tpot_error'], '+'):>7} {_share(row['forward_error_p95_abs']):>7} {lanes} "
        f"{row['undisturbed_share']:5.0%} {row['decided_alike']:5.0%}  {'yes' if same else 'NO'}",
        f"{'':24} {times('simulated')}",
    )


_VERDICTS = {
    "pass": "pass",
    "fail": "fail",
    "busy": "busy: this machine disturbed too many forwards to judge the clock",
}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3f}"


def _share(value: float | None, sign: str = "", places: int = 2) -> str:
    return "-" if value is None else f"{value:{sign}.{places}%}"
