"""The verbs about models that compute something else: quality, paths. Arguments: key=value."""

from __future__ import annotations

import argparse

from oled.cli import runs

VERBS = {
    "quality": "what a change of the routed experts costs a model: loss and text, with and without",
    "paths": "divide experts into halves that share expansions; the trace of their paths",
}

KEYS = {
    "quality": """\
  model=tiny|NAME|PATH         and its keys, as in oled record
  prompts=FILE skip=N limit=N  JSONL with answers; default: the bundled prompts
  policy=NAME                  one that changes routes (des_seq, des_vote, block_pool)
  paths=FILE.npz               or what oled paths has made of the experts
  decode=block_diffusion       and its keys; free=false: no free decoding, the loss alone
  out=DIR                      writes DIR/quality.json""",
    "paths": """\
  model=tiny|NAME|PATH         and its keys, as in oled record
  learn.prompts=FILE           JSONL with answers, on which paths are judged and refit
  learn.skip=N learn.limit=64  which of them
  tolerance=0.3                what a path may lose of its expert's squared output
  prompts=FILE skip=N limit=N  other prompts, which the model decodes on its paths
  decode=block_diffusion       and its keys
  trace=NAME|DIR|synthetic     instead of a model: made-up paths for a trace,
  share=0.5                    this share of the expansions kept, at random (seed=N)
  out=DIR                      writes DIR/trace; of a model DIR/paths.npz and DIR/quality.json""",
}


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for verb, summary in VERBS.items():
        verbs.add_parser(
            verb,
            help=summary,
            usage=f"oled {verb} [key=value ...]",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"keys:\n{KEYS[verb]}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )


def run(verb: str, arguments: list[str]) -> int:
    """Runs a verb whose arguments are key=value."""
    from oled.cli import altered_jobs

    runs.quiet_bars()
    job = {"quality": altered_jobs.quality, "paths": altered_jobs.paths}[verb]
    return runs.run_hydra(verb, arguments, job)
