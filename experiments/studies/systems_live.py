"""The bundled model on held-out problems, as the study `systems` needs it: traces and quality.

One recording of the unchanged model, with router scores and what its trained predictors say; one of
the same text by drafts; one of the model under each rule that changes routes, and one of its pruned
paths; and SPICE live, whose misses are given up. The model decodes freely, two tokens a forward, so
what is altered writes its own text. Made anew each time.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oled.bundled.studies.recorded import TOKENS_PER_FORWARD, problems
from oled.policies.composition import load_composition
from oled.sim.settings import Settings

log = logging.getLogger("oled")

RULES = ("des_seq", "des_vote", "block_pool")
TOLERANCE = 0.3  # of a path's squared error: `oled paths` has it as default
ALL_SCORES = 1 << 16  # a recorder keeps no more than there are


@dataclass(frozen=True, slots=True)
class Size:
    """Set how much is recorded.

    So many problems of `demo` are judged, so many of `calibration` prune the paths.
    """

    prompts: int = 9
    learned: int = 9
    new_tokens: int = 96


SMALL = Size(prompts=1, learned=1, new_tokens=16)


@dataclass(frozen=True, slots=True)
class Altered:
    """A changed model: what it routed, and its quality beside the unchanged one's."""

    trace: str
    quality: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Live:
    """What was recorded. Traces by their folders."""

    plain: str
    requests: int
    drafted: str  # the same text, by drafts and their verification
    altered: Mapping[str, Altered]  # by policy
    given_up: Mapping[int, Mapping[str, Any]]  # quality of `spice` by slots a layer


def run_live(size: Size, folder: Path, slots: Sequence[int]) -> Live:
    """Record and measure everything, into `folder`; what was there is removed.

    slots: of SPICE's caches, for what it gives up depends on what it misses.
    """
    from oled.bundled.studies.approximated_misses import driver
    from oled.quality.approximated import SURROGATES, Exact, approximations
    from oled.quality.measure import quality
    from oled.record import (
        BlockDiffusion,
        SpeculativeBlocks,
        load_model,
        record,
    )
    from oled.record.split_experts import record_split_experts
    from oled.running.rerouting import Rerouting

    shutil.rmtree(folder, ignore_errors=True)
    loaded = load_model("tiny", "cpu")
    judged = problems("demo")[: size.prompts]
    learned = problems("calibration")[: size.learned]
    settings = {"max_new_tokens": size.new_tokens, "tokens_per_forward": TOKENS_PER_FORWARD}
    decode = BlockDiffusion(16, **settings)
    log.info("bundled model: %d prompts as it is", len(judged))
    plain = folder / "tiny"
    record(loaded, judged, decode, plain, score_width=ALL_SCORES, heads="bundled")
    log.info("bundled model: draftexpert")
    drafted = folder / "tiny-draftexpert"
    record(loaded, judged, SpeculativeBlocks(16, **settings), drafted)
    altered = {}
    for policy in RULES:
        log.info("bundled model: %s", policy)
        rule = load_composition(policy).reroute
        trace = folder / f"tiny-{policy}"
        change = Rerouting(loaded.model, rule)
        found = quality(loaded, judged, decode, change).summary() | change.summary()
        record(loaded, judged, decode, trace, reroute=rule)
        altered[policy] = Altered(str(trace), found)
    log.info("bundled model: pcomoe, pruned on %d other prompts", len(learned))
    done = record_split_experts(loaded, learned, judged, decode, TOLERANCE, folder / "tiny-pcomoe")
    found = done.quality.summary() | done.split.summary()
    altered["pcomoe"] = Altered(str(done.trace), found)
    given_up, exact = {}, None
    for number in slots:
        log.info("bundled model: spice, %d slots", number)
        spice = load_composition("spice")
        live = driver(loaded, judged, Settings(slots=number))
        exact = exact or Exact.of(loaded, judged, decode, live)
        found = approximations(exact, spice, live, live(spice, decode, True))
        given_up[number] = found[SURROGATES].summary()
    return Live(str(plain), len(judged), str(drafted), altered, given_up)
