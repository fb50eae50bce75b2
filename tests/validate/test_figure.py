"""The scatter of a report: every configuration that has a figure, whatever the verdict."""

from __future__ import annotations

import importlib

import pytest

figure = importlib.import_module("oled.bundled.plots.validate")
style = importlib.import_module("oled.bundled.plots.style")


def row(policy: str, slots: int, error: float | None) -> dict:
    known = error is not None
    return {
        "policy": policy,
        "slots": slots,
        "tpot_error": error,
        "live_tpot_ns": 1e6 * (1 + error) if known else None,
        "simulated_tpot_ns": 1e6 if known else None,
        "forward_error_p95_abs": 0.01 if known else None,
    }


def report(*errors: float | None) -> dict:
    rows = [row("lru", place, error) for place, error in enumerate(errors)]
    known = [abs(error) for error in errors if error is not None]
    return {
        "configurations": rows,
        "verdict": "busy",
        "tpot_error_max_abs": max(known, default=None),
        "undisturbed_share": 0.5,
    }


def test_configurations_without_a_time_are_left_out(tmp_path):
    drawn = figure.draw(report(0.01, None, -0.02))
    points = [line for line in drawn.axes[0].lines if line.get_marker() not in ("", "None")]
    assert len(points) == 2
    assert all(file.stat().st_size > 0 for file in style.save(drawn, tmp_path, "validate"))


def test_a_report_without_any_time_is_drawn_too():
    assert "no undisturbed forward" in figure.draw(report(None)).axes[0].texts[0].get_text()


@pytest.mark.parametrize("key", figure.NEEDS)
def test_what_the_figure_needs_is_in_a_report(key):
    assert key in report(0.0)
