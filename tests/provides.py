"""What a trace holds, as a row of the table in docs/traces.md: computed here, compared by tests.

Run it to see the rows that the documentation has; a test whose row differs prints the right one.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from oled.trace import Phase, Trace

DOCS = Path(__file__).parents[1] / "docs" / "traces.md"
COLUMNS = (
    "weights",
    "confidence",
    "requests",
    "order",
    "phases",
    "tokens",
    "layers",
    "router scores",
    "predictions",
)


def row(trace: Trace) -> tuple[str, ...]:
    """The cells of a trace, in the order of `COLUMNS`."""
    return (
        _weights(trace),
        _confidence(trace),
        _unless(trace, "requests"),
        _order(trace),
        _phases(trace),
        _tokens(trace),
        _unless(trace, "layers", "absolute"),
        _scores(trace),
        _predictions(trace),
    )


def _unless(trace: Trace, word: str, what: str = "yes") -> str:
    return "no" if word in trace.manifest.lacks else what


def _order(trace: Trace) -> str:
    yes = "within a request" if "passes" in trace.manifest.lacks else "yes"
    return yes if trace.manifest.ordered else "no"


def _weights(trace: Trace) -> str:
    about = trace.manifest
    if not about.has_weights:
        return "no"
    total = "" if about.weight_sum is None else f" {about.weight_sum:g}"
    return f"`{about.weight_kind}`{total}"


def _confidence(trace: Trace) -> str:
    return f"`{trace.manifest.confidence_kind}`" if trace.manifest.has_confidence else "no"


def _phases(trace: Trace) -> str:
    if "phases" in trace.manifest.lacks:
        return "no"
    return ", ".join(Phase(phase).name.lower() for phase in np.unique(trace.forwards.phase))


def _tokens(trace: Trace) -> str:
    if "tokens" in trace.manifest.lacks:
        return "counts only"
    known = [word for word in ("token_ids", "positions") if word not in trace.manifest.lacks]
    return ", ".join(word.removeprefix("token_") for word in known) or "no"


def _scores(trace: Trace) -> str:
    if trace.scores is None:
        return "no"
    return "yes" if trace.scores.biased is None else "yes, biased too"


def _predictions(trace: Trace) -> str:
    if trace.predictions is None:
        return "no"
    ahead = np.unique(trace.predictions.target - trace.predictions.layer)
    return f"h = {ahead.min()} … {ahead.max()}"


def documented() -> dict[str, tuple[str, ...]]:
    """The rows of the documentation by their source."""
    text = DOCS.read_text(encoding="utf-8")
    head = f"| source | {' | '.join(COLUMNS)} |\n"
    table = text[text.index(head) + len(head) :].split("\n\n", 1)[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines()[1:]]
    return {source: tuple(cells) for source, *cells in rows}


def assert_documented(source: str, trace: Trace) -> None:
    """The documentation has this very row."""
    found = row(trace)
    assert documented().get(source) == found, f"| {source} | {' | '.join(found)} |"


if __name__ == "__main__":
    for source, cells in documented().items():
        print(source, *cells, sep=" | ")
