"""The verbs that run something: demo, record, simulate. Their arguments are key=value."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oled.cli.usage import UsageError
from oled.errors import nearest
from oled.paths import conf_dir

if TYPE_CHECKING:
    from oled.cli.jobs import Job

VERBS = {
    "demo": "the whole job on the bundled model: record, check, replay, compare",
    "record": "a model decodes prompts and its routing becomes a trace",
    "simulate": "replay a trace under a policy on some hardware",
}

KEYS = {
    "demo": """\
  out=DIR                      where everything goes (default: demo-out)
  device=auto|cpu|cuda         where the model runs""",
    "record": """\
  model=tiny|FOLDER|OWNER/NAME the bundled model, a checkpoint, or one on the hub
  model.revision=              branch, tag or commit on the hub
  model.trust_remote_code=true code that comes with the checkpoint may run here (default: false)
  model.dtype=auto|float32|bfloat16|float16  model.device=auto|cpu|cuda
  prompts=FILE                 JSONL: GSM8K's fields, HumanEval's, or `prompt` and `reference`
  skip=N limit=N batch_size=N  which prompts, and how many at once
  chat=true|false              through the tokenizer's chat template (default: where it has one)
  horizons=H score_width=M     also next-gate predictions, and the best router scores
  heads=bundled|FILE           also what trained predictors say
  policy=NAME                  one that changes routes (des_seq, des_vote, block_pool)
  decode=block_diffusion|autoregressive|canvas_diffusion
  decode=speculative_blocks|speculative_autoregressive  drafted and verified, the same text
  decode.max_new_tokens=256    and any other key of its file, as decode.block_length=16
                               decode.threshold=0.9 decode.mode=free|forced
  seed=N                       of canvases
  out=DIR                      the trace""",
    "simulate": """\
  trace=NAME|DIR|synthetic     a bundled trace, a folder, a made-up one (trace.geometry=…)
  trace.allow_partial=true     replay what a crash has left of it
  policy=NAME|FILE.yaml        and any part of it, as policy.retention.smoothing=0.5
  cache.slots=40|0.25|8GiB     a count, a fraction of all experts' bytes, bytes
  cache.scope=layer|global  cache.staging=8|unbounded  cache.lifecycle=request|persistent
  hardware=NAME|FILE.yaml      and any number of it, as hardware.h2d_pinned='25 GB/s'
  runtime=NAME|FILE.yaml       what the software adds
  cost.geometry=NAME           take bytes and times of another model
  cost.cpu_kernel=tuned|torch  cost.pinned=true|false
  workload.batch_size=1        requests in lockstep
  workload.stages=FILE|learned cues that divide autoregressive text, for policy=saem
  topology=NAME|FILE.yaml      several GPUs, for policy=static_ep|eplb|epic
  calibration=NAME|DIR         another trace, for policies that learn beforehand
  timeline=FILE.json.gz        opens in Perfetto; window=[first,count] chooses the forwards
  out=OUT                      writes OUT/metrics.json; a sweep OUT/results.parquet

  -m, --multirun               sweep over comma-separated values
  --cfg job                    print the configuration and stop""",
}

GROUPS = {
    "demo": (),
    "record": ("model", "decode"),
    "simulate": ("trace", "policy", "hardware", "runtime", "topology", "cache", "experiment"),
}


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for verb, summary in VERBS.items():
        options = "".join(f"\n  {group}: {', '.join(_options(group))}" for group in GROUPS[verb])
        verbs.add_parser(
            verb,
            help=summary,
            usage=f"oled {verb} [key=value ...]",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"keys:\n{KEYS[verb]}\n" + (f"\nbundled:{options}\n" if options else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def run(verb: str, arguments: list[str]) -> int:
    """Runs a verb whose arguments are key=value."""
    quiet_bars()
    if verb == "demo":
        return _demo(arguments)
    from oled.cli import jobs

    return run_hydra(verb, arguments, {"record": jobs.record, "simulate": jobs.simulate}[verb])


def quiet_bars() -> None:
    """No bars of transformers, which do not ask, where nobody watches."""
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def _demo(arguments: list[str]) -> int:
    values = {"out": "demo-out", "device": "auto"}
    for argument in arguments:
        key, given, value = argument.partition("=")
        if key not in values:
            raise UsageError(f"there is no key '{key}'; {nearest(key, values)}")
        if not given or not value:
            raise UsageError(f"'{argument}' is not key=value")
        values[key] = value
    from oled.studies.demo import demo

    log_to_stderr()
    print(demo(Path(values["out"]), device=values["device"]))
    return 0


def log_to_stderr() -> None:
    logger = logging.getLogger("oled")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())


def run_hydra(verb: str, arguments: list[str], job: Job) -> int:
    """Composes the verb's configuration and runs its job, once or over a sweep."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors come to us instead of to the terminal
    import hydra

    from oled.cli import jobs, overrides, schema, sweep

    schema.register()
    sys.argv = [f"oled {verb}", *overrides.rewrite(arguments)]
    main = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)
    try:
        main(functools.partial(jobs.run, job))()
        if jobs.failure:
            raise jobs.failure[0]
    except Exception as error:
        line = overrides.complaint(error, verb)
        if line is None:
            raise
        raise line from error
    return 0 if sweep.SweepFolder.path is None else sweep.finish(sweep.SweepFolder.path)
