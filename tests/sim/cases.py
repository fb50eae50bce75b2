"""Random small workloads with everything that a part may look at."""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.sim.calibration import Calibration
from oled.trace.schema import Phase
from oled.trace.steps import Steps

from .build import Forward, Machine, make_steps

HORIZONS = 3


def random_steps(
    rng: np.random.Generator,
    num_experts: list[int],
    top_k: int,
    requests: int,
    diffusion: bool,
    expert_bytes: int | list[int] = 100,
    predictions: bool = True,
    scores: bool = True,
    foresees: bool = False,
    drafts: bool = False,
) -> Steps:
    """Requests with a prefill, then blocks of denoising and commits, or decoded tokens.

    `foresees`: predictions go on into the next forward. `drafts`: forwards that would decode are
    drafts, or verify those before them, and a kept draft says at its last layer what comes.
    """
    forwards = []
    for request in range(requests):
        favourite = [rng.dirichlet(np.full(e, 0.5)) for e in num_experts]
        forwards.append(_forward(rng, request, Phase.PREFILL, -1, -1, 4, favourite, top_k))
        for block in range(int(rng.integers(1, 3))):
            for step in range(int(rng.integers(1, 4))):
                phase = Phase.DENOISE if diffusion else Phase.DECODE
                where = (block, step) if diffusion else (-1, -1)
                tokens = 3 if diffusion else 1
                forwards.append(_forward(rng, request, phase, *where, tokens, favourite, top_k))
            if diffusion:
                phase = Phase.COMMIT
                forwards.append(_forward(rng, request, phase, block, 3, 3, favourite, top_k))
    steps = make_steps(forwards, num_experts, top_k, expert_bytes)
    steps = dataclasses.replace(steps, mass=_masses(rng, steps))
    if scores:
        table = rng.random((steps.num_steps, max(num_experts))).astype(np.float32)
        steps = dataclasses.replace(steps, scores=table / table.sum(axis=1, keepdims=True))
    if predictions:
        steps = dataclasses.replace(steps, **_predictions(rng, steps, foresees))
    return _drafted(rng, steps) if drafts else steps


def _forward(
    rng: np.random.Generator,
    request: int,
    phase: Phase,
    block: int,
    step: int,
    tokens: int,
    favourite: list[np.ndarray],
    top_k: int,
) -> Forward:
    """Each token takes `top_k` experts of each layer, the popular ones more often."""
    layers = {}
    for layer, share in enumerate(favourite):
        active: dict[int, int] = {}
        for _ in range(tokens):
            for e in rng.permutation(share.size)[np.argsort(-rng.random(share.size) * share)][
                :top_k
            ].tolist():
                active[e] = active.pop(e, 0) + 1  # the last mention counts
        layers[layer] = active
    produced = 0 if phase is Phase.PREFILL else 1
    return Forward(layers, request, phase, tokens, block, step, produced)


def _masses(rng: np.random.Generator, steps: Steps) -> np.ndarray:
    """GATE, GATE_MASKED, CONF_MASKED, CONF_OPENED, as they can occur together."""
    gate = steps.count * rng.uniform(0.1, 0.9, steps.count.size)
    masked = gate * rng.random(gate.size)
    confident = masked * rng.random(gate.size)
    opened = (gate - masked) * rng.random(gate.size)
    return np.ascontiguousarray(np.stack([gate, masked, confident, opened], 1), np.float32)


def _predictions(rng: np.random.Generator, steps: Steps, foresees: bool) -> dict[str, object]:
    """Right about half of the experts up to three layers on, wrong about others."""
    lists, scores = [], []
    for s in range(steps.num_steps):
        for ahead in range(1, HORIZONS + 1):
            target = s + ahead
            said: list[int] = []
            if target < steps.num_steps and (
                steps.layer[target] == steps.layer[s] + ahead
                or (foresees and ahead <= steps.num_layers)
            ):
                active = steps.expert[steps.offsets[target] : steps.offsets[target + 1]]
                said = [int(e) for e in active if rng.random() < 0.5]
                said += [int(e) for e in rng.integers(0, steps.num_experts[steps.layer[target]], 2)]
                said = list(dict.fromkeys(said))
            lists.append(said)
            scores.append(sorted(rng.random(len(said)).tolist(), reverse=True))
    return {
        "pred_offsets": np.cumsum([0, *map(len, lists)]).astype(np.int64),
        "pred_expert": np.array([e for said in lists for e in said], np.uint16),
        "pred_score": np.array([v for row in scores for v in row], np.float32),
        "horizons": HORIZONS,
    }


def _drafted(rng: np.random.Generator, steps: Steps) -> Steps:
    """The phases of speculative decoding; the last forward of a run of drafts verifies them."""
    decodes = np.isin(steps.phase, (Phase.DENOISE, Phase.DECODE))
    ends = np.append(~decodes[1:] | (steps.request[1:] != steps.request[:-1]), True)
    verifies = ends | (rng.random(len(ends)) < 0.3)
    phase = np.where(decodes, np.where(verifies, Phase.VERIFY, Phase.DRAFT), steps.phase)
    layers, lists = steps.num_layers, []
    for s in range(steps.num_steps):
        kept = phase[steps.forward[s]] == Phase.DRAFT and rng.random() < 0.8
        for target in range(layers):
            experts = int(steps.num_experts[target])
            said = rng.permutation(experts)[: rng.integers(1, experts + 1)].tolist()
            lists.append(said if kept and steps.layer[s] == layers - 1 else [])
    return dataclasses.replace(
        steps,
        phase=phase.astype(np.int64),
        pred_offsets=np.cumsum([0, *map(len, lists)]).astype(np.int64),
        pred_expert=np.array([e for said in lists for e in said], np.uint16),
        pred_score=np.ones(sum(map(len, lists)), np.float32),
        horizons=layers,
    )


def random_machine(rng: np.random.Generator) -> Machine:
    """Copies slower or faster than experts; any number may be small."""
    return Machine(
        head=int(rng.integers(0, 30)),
        dense=int(rng.integers(0, 60)),
        group_t0=int(rng.integers(1, 30)),
        group_per_token=int(rng.integers(0, 4)),
        group_per_expert=int(rng.integers(1, 20)),
        cpu_call=int(rng.integers(0, 10)),
        cpu_expert=int(rng.integers(1, 60)),
        cpu_per_token=int(rng.integers(0, 10)),
        act_out=int(rng.integers(0, 10)),
        act_back=int(rng.integers(0, 10)),
        copy=int(rng.integers(1, 80)),
        copy_wake=int(rng.integers(0, 10)),
        cpu_contention_ppm=int(rng.choice([1_000_000, 700_000])),
        link_contention_ppm=int(rng.choice([1_000_000, 400_000])),
        policy=int(rng.choice([0, 7])),
        draft=int(rng.integers(0, 10)),
    )


def random_calibration(rng: np.random.Generator, steps: Steps) -> Calibration:
    """Learned from other requests of the same shape."""
    other = random_steps(rng, steps.num_experts.tolist(), steps.top_k, 3, True)
    return Calibration.from_steps(other)
