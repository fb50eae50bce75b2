"""A trace's routing token by token, with the GPU that each token lives on.

Letters: F forwards (several requests in lockstep where asked for), S layer-steps, N token rows, R
ranks, k top-k. Attention is data parallel: the tokens of a forward, in the order of the batch's
rows, are dealt to the ranks in contiguous equal shares; token i of T lives on rank i * R // T. With
as many rows as ranks, and as many tokens in each, a rank has whole rows; a single row is split by
position.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from oled.trace import NO_EXPERT, TokenState, Trace, batch, build_steps
from oled.trace.batch import lockstep
from oled.trace.steps import Rows, Steps, dense_layers
from oled.types import Ints


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A trace's routing as the clock of several GPUs replays it."""

    steps: Steps  # of the same forwards: phases, tokens produced, requests
    rows: dict[int, int]  # batch rows of each request (group) of `steps`
    forward: Ints  # [S]
    layer: Ints  # [S] place 0..L-1
    offsets: Ints  # [S + 1] into the token rows
    home: Ints  # [N] rank
    expert: Ints  # [N, k], -1 unused
    tokens: Ints  # [F, R] that live on each rank
    context: Ints  # [F, R] cached tokens that these attend to
    shares: Rows  # the part of each sequence that lives on a rank; its forward is [F * R]

    @classmethod
    def of(cls, trace: Trace, ranks: int, batch_size: int) -> Routing:
        """Build the routing of a loaded trace, with `batch_size` requests in lockstep."""
        alone = build_steps(trace)
        group, ends, members = lockstep(alone, batch_size)
        joined = np.repeat(np.arange(len(group)), np.diff(ends))  # of each member
        size = alone.tokens[members]
        first = np.cumsum(size) - size  # tokens of all members before it
        first -= first[ends[:-1]][joined]  # ... of the same joined forward
        total = np.add.reduceat(size, ends[:-1])
        tokens, context, shares = _shares(joined, first, size, total, alone.context[members], ranks)
        place = np.empty((2, trace.num_forwards), np.int64)  # by forward of the trace
        place[:, alone.source[members]] = joined, first
        forward, layer, home, expert = _token_rows(trace, place, total, ranks)
        order = np.lexsort((layer, forward))  # stable: rows of a batch, then tokens
        key = np.stack([forward[order], layer[order]])
        begins = np.flatnonzero(np.append(True, (np.diff(key) != 0).any(axis=0)))
        steps = batch(alone, batch_size)
        requests = np.unique(alone.request).size
        return cls(
            steps=steps,
            rows={
                int(request): min(batch_size, requests - place * batch_size)
                for place, request in enumerate(np.unique(steps.request))
            },
            forward=key[0, begins],
            layer=key[1, begins],
            offsets=np.append(begins, len(order)),
            home=home[order],
            expert=expert[order],
            tokens=tokens,
            context=context,
            shares=shares,
        )


def _shares(
    joined: Ints, first: Ints, size: Ints, total: Ints, context: Ints, ranks: int
) -> tuple[Ints, Ints, Rows]:
    """Tokens and context of each rank [F, R]; a row's context counts on each rank with its
    tokens. And the rows of each rank."""
    rank = np.arange(ranks)
    bounds = -(-np.arange(ranks + 1) * total[:, None] // ranks)  # first token of each rank
    low = np.maximum(bounds[joined, :-1], first[:, None])
    high = np.minimum(bounds[joined, 1:], (first + size)[:, None])
    mine = np.maximum(high - low, 0)  # [members, R]
    tokens, contexts = np.zeros((2, len(total), rank.size), np.int64)
    np.add.at(tokens, joined, mine)
    np.add.at(contexts, joined, np.where(mine > 0, context[:, None], 0))
    member, place = np.nonzero(mine)
    rows = Rows(joined[member] * ranks + place, mine[member, place], context[member])
    return tokens, contexts, rows


def _token_rows(
    trace: Trace, place: Ints, total: Ints, ranks: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return forward, layer and home [N] of the routing rows in batch order, and experts [N, k]."""
    routing, tokens = trace.routing, trace.tokens
    row = trace.forwards.token_offsets[routing.forward] + routing.token
    counts = tokens.state != TokenState.PAD
    number = np.cumsum(counts) - counts  # tokens without padding before each
    within = number[row] - number[trace.forwards.token_offsets[routing.forward]]
    forward, first = place[:, routing.forward]
    layer = dense_layers(trace, routing.layer)
    kept = counts[row]
    index = (first + within)[kept]
    order = np.argsort(index, kind="stable")
    forward, layer = forward[kept][order], layer[kept][order]
    expert = routing.expert_ids[kept][order].astype(np.int64)
    experts = np.array(trace.geometry.experts_per_layer)[layer][:, None]
    expert[(expert == NO_EXPERT) | (expert >= experts)] = -1  # unused, or a zero expert
    return forward, layer, index[order] * ranks // total[forward], expert
