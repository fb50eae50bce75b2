"""The rules about the forwards and tokens tables."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from oled.trace.check.counts import count_between
from oled.trace.check.report import Collector, Locate
from oled.trace.files import Columns
from oled.trace.manifest import Manifest, Part
from oled.trace.schema import Phase, TokenState
from oled.types import Array, Bools, ExpertIds, Ints


def locator(parts: Sequence[Part]) -> Locate:
    """Return a function from a row of a whole table to its file and the row in it."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.rows)

    def locate(row: int) -> tuple[str, int]:
        index = bisect.bisect_right(starts, row) - 1
        return parts[index].file, row - starts[index]

    return locate


def check_forwards(columns: Columns, manifest: Manifest, locate: Locate, found: Collector) -> None:
    """Check numbering, known values, order, and produced against accepted tokens."""
    signed = {name: values.astype(np.int64) for name, values in columns.items()}

    def report(rule: str, wrong: Bools, name: str, text: str) -> None:
        values = signed[name]
        found.add_rows(
            rule,
            wrong,
            locate,
            lambda i: (f"forward {i}: {name} {values[i]} {text}", None, str(values[i])),
        )

    rows = np.arange(len(signed["forward"]))
    report("numbering", signed["forward"] != rows, "forward", "is not the row's number")
    report("values", signed["phase"] > max(Phase), "phase", "is unknown")
    report("values", signed["tokens"] < 1, "tokens", "must be at least 1")
    for name in ("block", "step", "measured_ns"):
        report("values", signed[name] < -1, name, "must be -1 (none) or more")
    report("values", signed["context"] < 0, "context", "must not be negative")
    if not manifest.ordered:
        return
    falls = np.append(False, np.diff(signed["pass_id"]) < 0)
    report("order", falls, "pass_id", "is smaller than the pass before")
    # within a request, in recorded order
    order = np.argsort(signed["request"], kind="stable")
    here = {name: values[order] for name, values in signed.items()}
    same = np.diff(here["request"]) == 0

    def after(wrong: Bools) -> Bools:
        """Return flags of forwards, from flags of (predecessor, forward) pairs of one request."""
        flags = np.zeros(len(rows), dtype=bool)
        flags[order[1:]] = same & wrong
        return flags

    report(
        "order",
        after(np.diff(here["pass_id"]) == 0),
        "request",
        "has two forwards in one pass",
    )
    in_block = here["block"] >= 0
    paired = in_block[1:] & in_block[:-1]
    report(
        "order", after(paired & (np.diff(here["block"]) < 0)), "block", "comes after a later block"
    )
    together = paired & (np.diff(here["block"]) == 0)
    denoise = here["phase"] == Phase.DENOISE
    steps = together & denoise[1:] & denoise[:-1] & (np.diff(here["step"]) <= 0)
    report("order", after(steps), "step", "does not follow the step before")
    reopened = together & denoise[1:] & (here["phase"][:-1] == Phase.COMMIT)
    report("order", after(reopened), "block", "is denoised after its commit")
    speculative = np.isin(here["phase"], (Phase.DRAFT, Phase.VERIFY))
    unverified = (here["phase"][:-1] == Phase.DRAFT) & ~speculative[1:]
    report("order", after(unverified), "phase", "follows a draft, which nothing verifies")
    report("accepted", _overproduced(here, order), "produced", "makes more than were accepted")


def _overproduced(here: Columns, order: Ints) -> Bools:
    """Return forwards after which a request has produced more tokens than it accepted."""
    surplus = np.cumsum(here["produced"] - here["accepted"])
    starts = np.flatnonzero(np.append(True, np.diff(here["request"]) != 0))
    before = np.append(0, surplus)[starts]
    lengths = np.diff(np.append(starts, len(surplus)))
    flags = np.zeros(len(surplus), dtype=bool)
    flags[order] = surplus - np.repeat(before, lengths) > 0
    return flags


def check_tokens(
    columns: Columns,
    forwards: Columns,
    offsets: Ints,
    manifest: Manifest,
    locate: Locate,
    found: Collector,
) -> None:
    """Check numbering, known values, positions, accepted flags and confidences."""
    counts = np.diff(offsets)
    forward = np.repeat(np.arange(len(counts)), counts)  # as it should be
    token = np.arange(len(forward)) - np.repeat(offsets[:-1], counts)

    def report(rule: str, wrong: Bools, name: str, text: str) -> None:
        values = columns[name]
        found.add_rows(
            rule,
            wrong,
            locate,
            lambda i: (
                f"forward {forward[i]}, token {token[i]}: {name} {values[i]} {text}",
                None,
                str(values[i]),
            ),
        )

    report("numbering", columns["forward"] != forward, "forward", "is not the row's forward")
    report("numbering", columns["token"] != token, "token", "is not the row's place in it")
    wrong_request = columns["request"] != forwards["request"][forward]
    report("numbering", wrong_request, "request", "is not the forward's")
    state = columns["state"]
    report("values", state > max(TokenState), "state", "is unknown")
    report("values", columns["token_id"] < -1, "token_id", "must be -1 (unknown) or more")
    pad = state == TokenState.PAD
    position = columns["position"].astype(np.int64)
    follows = np.append(False, (np.diff(forward) == 0) & ~pad[1:] & ~pad[:-1])
    back = follows & (np.diff(position, prepend=0) <= 0)
    # a verification holds a block several times, as the draft had it after each step
    verified = forwards["phase"][forward] == Phase.VERIFY
    back &= ~(verified & (position == position[offsets[forward]]))
    if "requests" not in manifest.lacks:  # else a forward may hold tokens of several of them
        report("order", back, "position", "does not come after the token before")
    denoise = forwards["phase"][forward] == Phase.DENOISE
    accepted = columns["accepted"]
    report("values", accepted > 1, "accepted", "must be 0 or 1")
    opened = (accepted == 1) & denoise & (state != TokenState.MASKED)
    report("accepted", opened, "accepted", "although the token was not masked")
    _check_accepted(accepted, forwards["accepted"], offsets, locate, found)
    _check_confidence(columns["confidence"], state, manifest, report)


def _check_accepted(
    flags: NDArray[np.uint8],
    counts: ExpertIds,
    offsets: Ints,
    locate: Locate,
    found: Collector,
) -> None:
    """Check that a forward's flags add up to its count; a breach is reported at its first token."""
    sums = count_between(flags == 1, offsets)

    def say(forward: int) -> tuple[str, None, str]:
        text = f"{sums[forward]} tokens flagged as accepted, the forward says {counts[forward]}"
        return f"forward {forward}: {text}", None, str(sums[forward])

    found.add_rows("accepted", sums != counts, lambda forward: locate(int(offsets[forward])), say)


def _check_confidence(
    confidence: Array,
    state: Array,
    manifest: Manifest,
    report: Callable[[str, Bools, str, str], None],
) -> None:
    if not manifest.has_confidence:
        report("confidence", ~np.isnan(confidence), "confidence", "where the manifest says none")
        return
    wanted = (state == TokenState.MASKED) | (state == TokenState.DECODED)
    report("confidence", wanted & np.isnan(confidence), "confidence", "of a generated token")
    # a little above 1 is bf16 rounding; NaN compares false
    outside = (confidence < 0) | (confidence > 1.01)
    report("confidence", outside, "confidence", "is not in 0..1")
