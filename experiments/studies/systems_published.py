"""What the papers of the other systems measured, on their own models and machines, beside ours.

Second-hand where only summaries are public. Ours of a cached system are at the smaller cache, a
sixth of the experts, where the line says no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from oled.studies.reproduce import UNKNOWN, UNREAD, Claim, judge

SAEM = "arXiv 2608.21614; Qwen3-30B and ERNIE-4.5-21B, A100, HF"
ROUTERS = "arXiv 2609.04895; Qwen3-30B post-trained, GSM8K, 20 of 128 experts, replay"
SPICE = "arXiv 2608.21240; several models, RTX 5090 on PCIe 4 x8 and others"
DRAFTS = "arXiv 2607.24434; DeepSeek-V2-Lite and Moonlight, token by token, RTX 4090 and a phone"
PCOMOE = "arXiv 2609.01024; abstract"
DES = "arXiv 2602.00879; LLaDA2.0-mini, block 32, share 0.15"
POOL = "technical report of LLaDA2.2, trained with the pool"
EPIC = "EPIC, one public sentence"
BASELINES = ("lru", "inter_iteration", "ktransformers")

Ours = Callable[["Side"], float]


@dataclass(frozen=True, slots=True)
class Side:
    """The rows of one trace at one cache size, by system."""

    rows: pd.DataFrame

    def of(self, system: str, column: str) -> float:
        return float(self.rows.loc[system, column])

    def over(self, system: str, base: str, column: str = "tpot_ns") -> float:
        """Return `base` over `system`: how many times as fast, of times."""
        return self.of(base, column) / self.of(system, column)

    def best(self) -> str:
        """Return the fastest baseline."""
        return str(self.rows.loc[list(BASELINES), "tpot_ns"].astype(float).idxmin())


@dataclass(frozen=True, slots=True)
class Published:
    """A figure that ours can be held against: a ratio, or a rate."""

    what: str
    paper: float
    where: str
    ours: Ours
    neutral: float = 1.0  # no effect; verdicts are on the distance from it
    large: bool = False  # of ours the larger cache
    why: str = ""
    only: str | None = None  # of ours one trace


FIGURES = [
    Published(
        "SAEM: tokens a second over the strongest baseline, mean",
        1.33,
        f"{SAEM}, 3 to 50 % cached",
        lambda side: side.over("saem", side.best()),
        why="blocks are short, and the last one forecasts the next badly; the paper's stages are "
        "long stretches of reasoning, which no bundled recording has",
    ),
    Published(
        "SAEM: share of its clairvoyant's throughput",
        0.928,
        f"{SAEM}, 12.5 % cached, batch 1",
        lambda side: side.over("saem", "saem_oracle"),
        neutral=0.0,
        why="the same",
    ),
    Published(
        "SAEM: share of its clairvoyant's throughput, larger cache",
        0.879,
        f"{SAEM}, 50 % cached, batch 1",
        lambda side: side.over("saem", "saem_oracle"),
        neutral=0.0,
        large=True,
        why="the same; ours caches 39 %",
    ),
    Published(
        "Temporal Router: hit rate over LRU's",
        73.13 / 61.19,
        f"{ROUTERS}, 73.1 and 61.2 %",
        lambda side: side.over("lru", "temporal_router", "hit_rate"),
        why="a forward of a block asks for more experts than there are slots, and most tokens keep "
        "their route, which LRU follows too; heads alone were trained, as in the paper's 63.0 %",
    ),
    Published(
        "Temporal Router: bytes a token over LRU's",
        974 / 1407,
        f"{ROUTERS}, 974 and 1407 MB",
        lambda side: side.over("lru", "temporal_router", "decode_h2d_bytes_per_token"),
        why="the same",
    ),
    Published(
        "Spatio-Temporal Router: hit rate over LRU's",
        90.62 / 61.19,
        f"{ROUTERS}, 90.6 and 61.2 %",
        lambda side: side.over("lru", "spatio_temporal_router", "hit_rate"),
        why="on a clock a copy ahead has only the time of a layer; the paper's replay has no clock",
    ),
    Published(
        "Spatio-Temporal Router: bytes a token over LRU's",
        1474 / 1407,
        f"{ROUTERS}, 1474 and 1407 MB",
        lambda side: side.over("lru", "spatio_temporal_router", "decode_h2d_bytes_per_token"),
        why="the same",
    ),
    Published(
        "DraftExpert: plain decoding's time over its own, mean",
        1.45,
        DRAFTS,
        lambda side: (
            side.of("draftexpert", "undrafted_tpot_ns") / side.of("draftexpert", "tpot_ns")
        ),
        only="bundled model",
        why="ours drafts denoising steps of a block: the best experts of its 16 tokens are many, "
        "so that a draft is no cheap step, and fewer of its steps count",
    ),
    Published(
        "DraftExpert: drafted steps accepted",
        0.855,
        f"{DRAFTS}, 84 to 87 % of tokens",
        lambda side: side.of("draftexpert", "draft_acceptance"),
        neutral=0.0,
        only="bundled model",
        why="a step counts only if all positions and tokens are the model's own",
    ),
    Published(
        "DraftExpert: experts of the verification that the draft foresaw",
        0.87,
        f"{DRAFTS}, prefetch hits 86 to 88 %",
        lambda side: side.of("draftexpert", "draft_recall"),
        neutral=0.0,
        only="bundled model",
        why="what a draft's routers choose is known for all positions of the block",
    ),
    Published(
        "DraftExpert: a verification's time over a plain step's",
        1.325,
        f"{DRAFTS}, 1.25 to 1.40",
        lambda side: side.of("draftexpert", "relative_verify_cost"),
        neutral=0.0,
        only="bundled model",
        why="its experts were copied while the draft went on, which is the draft's time here",
    ),
    Published(
        "PCoMoE: whole experts' time over its own, at most",
        1.31,
        PCOMOE,
        lambda side: side.over("pcomoe", "inter_iteration"),
        only="bundled model",
        why="decided by how many expansions are pruned, which is not public",
    ),
    Published(
        "DES-Vote: distinct experts left",
        38 / 84,
        f"{DES}: 84 to 38",
        lambda side: side.of("des_vote, replayed", "rerouted_active_ratio"),
        why="at block 16 fewer experts are active at first",
    ),
    Published(
        "DES-Vote: accuracy kept",
        0.995,
        f"{DES}, mean of tasks",
        lambda side: (
            side.of("des_vote", "quality.accuracy") / side.of("des_vote", "quality.accuracy_plain")
        ),
        neutral=0.0,
        only="bundled model",
        why="ours is the share of held-out masked tokens that are guessed right",
    ),
]


def claims_of(sides: dict[tuple[str, bool], Side], parallel: pd.DataFrame) -> list[Claim]:
    """Compare `sides` by trace and whether its cache is the larger one."""
    lines = []
    for one in FIGURES:
        for (name, large), side in sides.items():
            if large == one.large and one.only in (None, name):
                ours = one.ours(side)
                verdict = judge(one.paper - one.neutral, ours - one.neutral)
                what, paper = f"{one.what}; {name}", f"{one.paper:.2f} ({one.where})"
                lines.append(Claim(what, paper, f"{ours:.2f}", verdict, one.why))
    return [*lines, *_without_figure(sides), *_several(parallel)]


def _without_figure(sides: dict[tuple[str, bool], Side]) -> list[Claim]:
    lines = []
    for (name, large), side in sides.items():
        if large:
            continue
        faster, less = (
            side.over("spice", "lru"),
            side.over("lru", "spice", "decode_h2d_bytes_per_token"),
        )
        lines.append(
            Claim(
                f"SPICE: time over its own, at most; {name}, over LRU",
                f"3.12 ({SPICE})",
                f"{faster:.2f}",
                UNREAD,
                "2.04 to 2.70 over AdapMoE, which is not here; most of ours is the CPU's share of "
                "the misses",
            )
        )
        lines.append(
            Claim(
                f"SPICE: bytes copied; {name}, to LRU's",
                f"-28 % ({SPICE})",
                f"{100 * (less - 1):+.0f} %",
                UNREAD,
                "accuracy fell 3 to 4 points in the paper; ours gives up a share of gate weight",
            )
        )
        pool = side.over("block_pool, replayed", "inter_iteration")
        lines.append(
            Claim(
                f"block pool: whole routes' time over its own; {name}, replayed",
                f"no figure ({POOL})",
                f"{pool:.2f}",
                UNKNOWN,
                "without the training",
            )
        )
    return lines


def _several(parallel: pd.DataFrame) -> list[Claim]:
    lines = []
    for (side, topology), rows in parallel.groupby(["side", "topology"], sort=False):
        tpot = rows.set_index("system")["tpot_ns"]
        lines.append(
            Claim(
                f"EPIC, EPLB: static placement's time over theirs; {side}, {topology}",
                f"no figure ({EPIC}; deepseek-ai/EPLB)",
                f"{tpot['static_ep'] / tpot['epic']:.2f}, {tpot['static_ep'] / tpot['eplb']:.2f}",
                UNKNOWN,
                "times follow the number of different experts, so placement has little to win",
            )
        )
    return lines
