"""Record a model: prompts in, a trace and a report out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel

from oled.altered.reroute import Reroute, RouteChange
from oled.errors import UserError
from oled.record.overhead import hook_overhead
from oled.record.provenance import manifest_of
from oled.record.records import forward_records, refuse_non_finite_weights
from oled.running.decode import Decoding, DecodingError, Pass, Request, Speculative
from oled.running.decode.batch import ignore_pass
from oled.running.loading import LoadedModel
from oled.running.prompts import Prompt, check_requests, tokenize, uses_template
from oled.running.recorder import Recorder
from oled.running.rerouting import Rerouting
from oled.running.threads import threads_for
from oled.trace.writer import ROWS_PER_PART, TraceWriter


@dataclass(frozen=True, slots=True)
class RecordReport:
    """The result of a recording. Fractions are of the time that decoding alone takes."""

    path: Path
    requests: int
    tokens: int  # produced: what TPOT divides by
    forwards: int
    seconds: float  # decoding and recording, without the calibration
    hook_fraction: float  # hooks, copies and building records, calibrated
    write_fraction: float  # handing records to the writer, measured
    change: RouteChange | None = None  # what a route-changing rule did

    @property
    def overhead_fraction(self) -> float:
        """Return the time that recording added to decoding."""
        return self.hook_fraction + self.write_fraction

    def __str__(self) -> str:
        text = (
            f"{self.path}: {self.tokens} tokens of {self.requests} prompts in {self.forwards} "
            f"forwards, {self.seconds:.1f} s; recording added {self.overhead_fraction:.1%} "
            f"(hooks {self.hook_fraction:.1%}, writing {self.write_fraction:.1%})"
        )
        return text if self.change is None else f"{text}\n{self.change}"


@dataclass(slots=True)
class _Tally:
    """Passes, tokens and times so far."""

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0  # writing included
    write_seconds: float = 0.0

    def decode(self, steps: Iterable[Pass], recorder: Recorder, writer: TraceWriter) -> None:
        """Run a batch to its end and append its records."""
        start, forward = time.perf_counter(), 0
        for step in steps:
            records = forward_records(self.passes, step, recorder.take(step.num_tokens))
            for offset, one in enumerate(records):
                refuse_non_finite_weights(forward + offset, one)
            forward += len(records)
            before = time.perf_counter()
            for one in records:
                writer.append(one)
            self.write_seconds += time.perf_counter() - before
            self.passes += 1
            self.tokens += sum(one.produced for one in records)
        self.seconds += time.perf_counter() - start

    def close(self, writer: TraceWriter) -> None:
        """Write what is pending; its time is writing time, too."""
        start = time.perf_counter()
        writer.close_part()
        self.write_seconds += time.perf_counter() - start
        self.seconds += time.perf_counter() - start


def record(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    decode: Decoding,
    out: str | Path,
    *,
    batch_size: int = 1,
    horizons: int = 0,
    score_width: int = 0,
    heads: str | Path | None = None,
    chat: bool | None = None,
    seed: int = 0,
    reroute: Reroute | None = None,
    rows_per_part: int = ROWS_PER_PART,
) -> RecordReport:
    """Decode the prompts and write the routing of every pass to the folder `out`.

    `horizons` H records next-gate predictions 1..H MoE layers ahead, `score_width` m the m best
    router scores of each token; 0 leaves them out. `heads` (a file, or "bundled") records what
    trained predictors say. `chat` is whether prompts go through the chat
    template, None: where the tokenizer has one. What is drawn at random for request i starts from
    `seed` + i. Under `reroute` the model follows that rule, and the trace holds the changed routes.
    A failure leaves a partial trace. Raises UserError for settings, prompts and models that do not
    go together, DecodingError for a model whose output is not finite or decides nothing.
    """
    _check(batch_size, horizons, score_width)
    if isinstance(decode, Speculative):
        _refuse_drafting(batch_size, reroute)
    settings = decode.resolve(loaded.model, loaded.tokenizer)
    requests = tokenize(prompts, loaded.tokenizer, chat=chat, seed=seed)
    check_requests(loaded.model, requests, settings)
    batches = [requests[at : at + batch_size] for at in range(0, len(requests), batch_size)]
    recorder = Recorder(loaded.model, score_width=score_width, horizons=horizons, heads=heads)
    rerouting = None if reroute is None else Rerouting(loaded.model, reroute)
    manifest = manifest_of(
        loaded,
        settings,
        prompts,
        recorder,
        batch_size=batch_size,
        chat=uses_template(loaded.tokenizer, chat),
        seed=seed,
        rule=reroute,
    )
    tally = _Tally()
    with (
        threads_for(loaded.model),
        TraceWriter(out, manifest, rows_per_part=rows_per_part) as writer,
    ):
        _decode_all(loaded.model, settings, batches, recorder, rerouting, writer, tally)
        tally.close(writer)
        # last: where decoding fails, the forwards before the failure have been recorded
        hooks = hook_overhead(loaded.model, settings, batches[0], recorder)
    plain = (tally.seconds - tally.write_seconds) / (1 + hooks)
    return RecordReport(
        path=Path(out),
        requests=len(requests),
        tokens=tally.tokens,
        forwards=writer.num_forwards,
        seconds=tally.seconds,
        hook_fraction=hooks,
        write_fraction=tally.write_seconds / plain,
        change=None if rerouting is None else rerouting.change,
    )


def _decode_all(
    model: PreTrainedModel,
    settings: Decoding,
    batches: Sequence[Sequence[Request]],
    recorder: Recorder,
    rerouting: Rerouting | None,
    writer: TraceWriter,
    tally: _Tally,
) -> None:
    """Decode batch after batch under the recorder's hooks, and append the records."""
    announce = ignore_pass if rerouting is None else rerouting.announce
    bar = tqdm(total=sum(map(len, batches)), unit="prompt", disable=None)
    kept = f"{writer.path} keeps the forwards before it, as a partial trace"
    with rerouting or nullcontext(), recorder, bar:
        for batch in batches:
            first = writer.num_forwards
            try:
                tally.decode(settings.decode(model, batch, announce), recorder, writer)
            except DecodingError as error:
                raise error.behind(first, kept) from None
            bar.update(len(batch))


def _check(batch_size: int, horizons: int, score_width: int) -> None:
    """Raise UserError for numbers below their least."""
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("horizons", horizons, 0),
        ("score_width", score_width, 0),
    ):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}")


def _refuse_drafting(batch_size: int, reroute: Reroute | None) -> None:
    """Raise UserError for what drafts do not go together with."""
    if batch_size > 1:
        raise UserError(f"batch_size={batch_size}: drafts are verified one prompt at a time")
    if reroute is not None:
        raise UserError(
            "a policy that changes routes needs a decode without drafts: use decode=block_diffusion"
        )
