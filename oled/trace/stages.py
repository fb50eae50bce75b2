"""Stages of autoregressive text: stretches between cues, found in the recorded token ids.

SAEM (arXiv 2608.21614) tells reasoning stages apart by discourse cues, phrases that begin a new
line of thought. Its list is not public, so one is given in a file or learned from another trace (a
*reconstruction*). A marked trace numbers its stages where block diffusion numbers its blocks, in
`forwards.block`: the same column serves recorders that know the boundaries themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from oled.trace.errors import TraceError
from oled.trace.schema import NO_EXPERT, Phase
from oled.trace.tables import Trace
from oled.types import Bools, Floats, Ints

STAGES = "stages"
"""The key of `manifest.provenance` that says how a trace was marked."""
_KEYS = ("cues", "phrases", "tokenizer", "shortest")


@dataclass(frozen=True, slots=True)
class Cues:
    """What begins a new stage."""

    sequences: tuple[tuple[int, ...], ...]  # token ids
    shortest: int = 16  # decode forwards that a stage lasts at least
    source: str = "given"

    def __post_init__(self) -> None:
        if not self.sequences or not all(self.sequences):
            raise TraceError(f"cues ({self.source}): none; give at least one token id each")
        if self.shortest < 1:
            raise TraceError(f"cues ({self.source}): shortest is {self.shortest}; at least 1")


def boundaries(tokens: Ints, cues: Cues) -> Bools:
    """Return the tokens that begin a stage, the first one always: bool like the ids i64[tokens].

    A stage begins with the token that completes a cue, unless the running one is too short.
    """
    complete = np.zeros(len(tokens), dtype=bool)
    for cue in cues.sequences:
        if len(cue) <= len(tokens):
            windows = np.lib.stride_tricks.sliding_window_view(tokens, len(cue))
            complete[len(cue) - 1 :] |= (windows == np.array(cue)).all(axis=1)
    begins = np.zeros(len(tokens), dtype=bool)
    begins[:1] = True
    last = 0
    for place in np.flatnonzero(complete).tolist():
        if place - last >= cues.shortest:
            begins[place], last = True, place
    return begins


def mark_stages(trace: Trace, cues: Cues) -> Trace:
    """Return the trace with its decode forwards numbered by stage, from 0 in each request."""
    block = trace.forwards.block.copy()
    if (block >= 0).any():
        raise TraceError(f"{trace.path}: it numbers blocks already; cues are for traces without")
    number = 0
    for forwards, tokens in _texts(trace):
        begins = boundaries(tokens, cues)
        block[forwards] = np.cumsum(begins) - 1
        number += int(begins.sum())
    note = f"{number} of {len(cues.sequences)} cues ({cues.source})"
    manifest = replace(trace.manifest, provenance={**trace.manifest.provenance, STAGES: note})
    return replace(trace, manifest=manifest, forwards=replace(trace.forwards, block=block))


def learn_cues(
    trace: Trace, *, window: int = 16, least: int = 3, most: int = 16, shortest: int = 16
) -> Cues:
    """Learn the tokens after which the experts change most (ours; the published list is not known).

    The change at a decoded token is 1 - cosine of the counts of (layer, expert) in the `window`
    tokens before and in those from it on. Cues are the tokens with at least `least` occurrences
    whose mean change is above that of all tokens by two standard errors; the `most` surest ones.
    """
    ids, changes = [], []
    for forwards, tokens in _texts(trace):
        change = _changes(_usage(trace, forwards), window)
        ids.append(tokens[window : window + len(change)])
        changes.append(change)
    token, place = np.unique(np.concatenate(ids), return_inverse=True)
    change = np.concatenate(changes)
    if len(change) == 0:
        raise TraceError(f"{trace.path}: no text of {2 * window} tokens to learn cues from")
    count = np.bincount(place)
    error = max(float(change.std()), 1e-9) / np.sqrt(count)
    surprise = (np.bincount(place, weights=change) / count - change.mean()) / error
    order = np.lexsort((token, -surprise))
    chosen = [i for i in order if count[i] >= least and surprise[i] > 2.0][:most]
    if not chosen:
        raise TraceError(f"{trace.path}: after no token do the experts change; give cues in a file")
    sequences = tuple((int(token[i]),) for i in chosen)
    return Cues(sequences, shortest, f"learned from {trace.path.name}")


def read_cues(file: str | Path) -> Cues:
    """Read cues from YAML: `cues` (lists of token ids), or `phrases` and a `tokenizer.json`."""
    path = Path(file)
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TraceError(f"{path}: no cues can be read ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict) or not set(data) <= set(_KEYS):
        raise TraceError(f"{path}: cues are a mapping with keys of {', '.join(_KEYS)}")
    sequences = [*_lists_of_ids(data.get("cues", []), path), *_encoded(data, path)]
    shortest = data.get("shortest", Cues.__dataclass_fields__["shortest"].default)
    if not isinstance(shortest, int):
        raise TraceError(f"{path}: shortest is {shortest!r}; it must be a number of forwards")
    return Cues(tuple(dict.fromkeys(sequences)), shortest, path.name)


def _lists_of_ids(data: Any, path: Path) -> list[tuple[int, ...]]:
    whole = isinstance(data, list) and all(
        isinstance(cue, list) and all(isinstance(token, int) for token in cue) for cue in data
    )
    if not whole:
        raise TraceError(f"{path}: cues must be lists of token ids, as [[12, 7], [45]]")
    return [tuple(cue) for cue in data]


def _encoded(data: dict[str, Any], path: Path) -> Iterator[tuple[int, ...]]:
    """Yield phrases as token ids, at the beginning of a text and behind a space."""
    phrases, name = data.get("phrases", []), data.get("tokenizer")
    if not phrases:
        return
    if not isinstance(phrases, list) or not all(isinstance(text, str) for text in phrases):
        raise TraceError(f"{path}: phrases must be a list of texts")
    if not isinstance(name, str):
        raise TraceError(f"{path}: phrases need a tokenizer: name its tokenizer.json")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path.parent / name))
    except Exception as error:  # the library raises nothing more specific
        raise TraceError(f"{path}: tokenizer '{name}' can not be read ({error})") from None
    for text in phrases:
        for form in (text, f" {text}"):
            yield tuple(tokenizer.encode(form, add_special_tokens=False).ids)


def _texts(trace: Trace) -> Iterator[tuple[Ints, Ints]]:
    """Yield each request's decode forwards [n] and the tokens [n] that they read."""
    forwards = trace.forwards
    decode = forwards.phase == Phase.DECODE
    if (forwards.tokens[decode] != 1).any() or not decode.any():
        raise TraceError(f"{trace.path}: stages need forwards that decode one token each")
    for request in trace.requests:
        mine = np.flatnonzero(decode & (forwards.request == request))
        tokens = trace.tokens.token_id[forwards.token_offsets[mine]].astype(np.int64)
        if (tokens < 0).any():
            raise TraceError(f"{trace.path}: token ids are not recorded; cues can not be found")
        yield mine, tokens


def _usage(trace: Trace, forwards: Ints) -> NDArray[np.int32]:
    """Count (layer, expert) of each of a request's decode forwards: i32[n, layers * E]."""
    geometry, routing = trace.geometry, trace.routing
    widest = max(geometry.experts_per_layer)
    place = np.full(trace.num_forwards, -1)
    place[forwards] = np.arange(len(forwards))
    rows = np.flatnonzero(place[routing.forward] >= 0)
    layer = np.searchsorted(np.array(geometry.moe_layers), routing.layer[rows])
    experts = routing.expert_ids[rows].astype(np.int64)
    used = (experts != NO_EXPERT) & (experts < widest)
    column = (layer * widest)[:, None] + experts
    usage = np.zeros((len(forwards), len(geometry.moe_layers) * widest), dtype=np.int32)
    row = np.broadcast_to(place[routing.forward[rows]][:, None], experts.shape)
    np.add.at(usage, (row[used], column[used]), 1)
    return usage


def _changes(usage: NDArray[np.int32], window: int) -> Floats:
    """Return 1 - cosine of the windows before and from each token window..n-window: f32[m]."""
    sums = np.concatenate([np.zeros_like(usage[:1]), np.cumsum(usage, axis=0, dtype=np.int32)])
    inside = (sums[window:] - sums[:-window]).astype(np.float32)  # [N - window + 1, .]
    before, after = inside[:-window], inside[window:]
    norm = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosine: Floats = (before * after).sum(axis=1) / np.maximum(norm, 1e-9)
    return 1.0 - cosine
