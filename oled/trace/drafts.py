"""Drafts and their verification in a trace, and what plain decoding would have recorded.

A verification computes several *states*: the one where the model stands, and those that the draft
has reached from it. In block diffusion a state is a copy of the block, in autoregressive text a
position. F forwards, `tokens` all tokens of all forwards, V verifications.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from oled.trace.reader import offsets_of, ranges_of
from oled.trace.schema import NO_EXPERT, Phase
from oled.trace.tables import ForwardTable, Trace
from oled.types import Ints

DRAFT = "draft"
"""The predictor that says which experts a verification will need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verifications:
    """All verifications of a trace, added up."""

    number: int  # V
    drafts: int  # draft forwards
    states: int  # that were verified
    steps: int  # of the model that counted, at least one of each verification
    needed: int  # (layer, expert) pairs that the verifications needed
    predicted: int  # pairs that the kept drafts had predicted
    foreseen: int  # pairs of both kinds

    def metrics(self) -> dict[str, float | None]:
        """Return rates; None where there is nothing to divide by."""
        drafted = self.states - self.number
        return {
            "draft_acceptance": _ratio(self.steps - self.number, drafted),
            "states_per_verify": _ratio(self.states, self.number),
            "steps_per_verify": _ratio(self.steps, self.number),
            "draft_recall": _ratio(self.foreseen, self.needed),
            "draft_precision": _ratio(self.foreseen, self.predicted),
        }

    @classmethod
    def of(cls, trace: Trace) -> Verifications | None:
        """Add up a trace's verifications; None where nothing was drafted."""
        phase = trace.forwards.phase
        verify = np.flatnonzero(phase == Phase.VERIFY)
        if not verify.size:
            return None
        state, steps = _states(trace)
        last = trace.forwards.token_offsets[verify + 1] - 1
        needed, predicted = _needed(trace), _predicted(trace, verify)
        return cls(
            number=len(verify),
            drafts=int((phase == Phase.DRAFT).sum()),
            states=int((state[last] + 1).sum()),
            steps=int(steps[verify].sum()),
            needed=len(needed),
            predicted=len(predicted),
            foreseen=len(np.intersect1d(needed, predicted)),
        )


def undrafted(trace: Trace) -> Trace:
    """Return what plain decoding with the same settings would have recorded.

    Drafts are gone; each step of the model that counted is a forward of its own. The tokens that a
    verification made final are those of its last step. Predictions and scores are left out.
    """
    old = trace.forwards
    state, steps = _states(trace)
    first = offsets_of(steps)
    owner = _owner(old)
    kept = np.flatnonzero(state < steps[owner])
    forward = first[owner] + state  # [tokens] new numbers of the tokens' forwards
    source = np.repeat(np.arange(len(steps)), steps)  # [F'] where a forward comes from
    nth = np.arange(len(source)) - first[source]
    offsets = offsets_of(np.bincount(forward[kept], minlength=len(source)))
    place = np.zeros(len(owner), dtype=np.int64)  # [tokens] new places in their forwards
    place[kept] = np.arange(len(kept)) - offsets[forward[kept]]

    verified, in_block = old.phase[source] == Phase.VERIFY, old.block[source] >= 0
    plain = np.where(in_block, Phase.DENOISE, Phase.DECODE)
    tokens = dataclasses.replace(
        trace.tokens,
        **{
            field.name: getattr(trace.tokens, field.name)[kept]
            for field in dataclasses.fields(trace.tokens)
        },
    )
    counts = np.bincount(forward[kept], weights=tokens.accepted, minlength=len(source))
    forwards = ForwardTable(
        request=old.request[source],
        pass_id=np.arange(len(source), dtype=np.uint32),
        phase=np.where(verified, plain, old.phase[source]).astype(np.uint8),
        block=old.block[source],
        step=np.where(verified & in_block, old.step[source] + nth, old.step[source]).astype(
            np.int32
        ),
        tokens=np.diff(offsets).astype(np.uint16),
        context=np.where(in_block, old.context[source], old.context[source] + nth).astype(np.int32),
        accepted=counts.astype(np.uint16),
        produced=np.where(nth + 1 == steps[source], old.produced[source], 0).astype(np.uint16),
        measured_ns=np.full(len(source), -1),
        token_offsets=offsets,
    )
    routing = trace.routing
    token = old.token_offsets[routing.forward] + routing.token
    rows = np.flatnonzero(state[token] < steps[routing.forward])
    token = token[rows]
    order = np.lexsort((place[token], routing.layer[rows], forward[token]))
    rows, token = rows[order], token[order]
    return dataclasses.replace(
        trace,
        manifest=dataclasses.replace(
            trace.manifest, geometry=dataclasses.replace(trace.geometry, draft_experts=0)
        ),
        hash=hashlib.sha256(f"{trace.hash} undrafted".encode()).hexdigest(),
        forwards=forwards,
        tokens=tokens,
        routing=dataclasses.replace(
            routing,
            forward=forward[token].astype(np.uint32),
            layer=routing.layer[rows],
            token=place[token].astype(np.uint16),
            expert_ids=routing.expert_ids[rows],
            weights=routing.weights[rows],
        ),
        predictions=None,
        scores=None,
    )


def _owner(forwards: ForwardTable) -> Ints:
    """Return the forward of each token [tokens]."""
    return np.repeat(np.arange(len(forwards.phase)), np.diff(forwards.token_offsets))


def _states(trace: Trace) -> tuple[Ints, Ints]:
    """Return each token's state in its verification, and the steps of each forward.

    The state [tokens] is 0 outside of verifications. Of a draft no step of the model counts [F], of
    any other forward at least one.
    """
    forwards, tokens = trace.forwards, trace.tokens
    owner = _owner(forwards)
    verify = forwards.phase == Phase.VERIFY
    begins = (tokens.position == tokens.position[forwards.token_offsets[owner]]) | (
        forwards.block[owner] < 0
    )
    count = np.cumsum(begins & verify[owner])
    first = count[forwards.token_offsets[:-1]]
    state = np.where(verify[owner], count - first[owner], 0)
    steps = np.where(forwards.phase == Phase.DRAFT, 0, 1).astype(np.int64)
    counted = np.flatnonzero(verify[owner] & (tokens.accepted == 1))
    np.maximum.at(steps, owner[counted], state[counted] + 1)
    return state, steps


def _needed(trace: Trace) -> Ints:
    """Return what the verifications were routed to, as sorted keys (forward, layer, expert)."""
    routing = trace.routing
    rows = np.flatnonzero(trace.forwards.phase[routing.forward] == Phase.VERIFY)
    ids = routing.expert_ids[rows].astype(np.int64)
    keys = (routing.forward[rows].astype(np.int64) << 32 | routing.layer[rows] << 16)[:, None] | ids
    return np.unique(keys[ids != NO_EXPERT])


def _predicted(trace: Trace, verify: Ints) -> Ints:
    """Return the same of what the drafts before each verification have predicted."""
    table = trace.predictions
    if table is None or DRAFT not in table.names:
        return np.zeros(0, dtype=np.int64)
    said = np.flatnonzero(table.predictor == table.names.index(DRAFT))
    lengths = np.diff(table.offsets)[said]
    entry = ranges_of(table.offsets[said], lengths)
    coming = np.searchsorted(verify, table.forward[said])
    known = coming < len(verify)  # a partial trace may end in a draft
    about = verify[np.minimum(coming, len(verify) - 1)] << 32 | table.target[said] << 16
    keys = np.repeat(about, lengths) | table.expert_ids[entry]
    return np.unique(keys[np.repeat(known, lengths)])


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
