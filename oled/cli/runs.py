"""The verbs whose configuration Hydra composes: key=value, and -m to sweep over values."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from oled.paths import conf_dir

VERBS = {
    "record": "a model decodes prompts and its routing becomes a trace",
    "simulate": "replay a trace under a policy on some hardware",
    "run": "a model decodes with offloaded experts, or a trace's routing is run live",
    "validate": "live runs beside simulations of the same routing: decisions, outputs, times",
    "quality": "what a change of the routed experts costs a model: loss and text, with and without",
    "paths": "divide experts into halves that share expansions; the trace of their paths",
}

LOOKS = ("--cfg", "-c", "--info", "-i", "--resolve", "--hydra-help", "--shell-completion", "-sc")
"""Hydra's flags that print something instead of running."""

MULTIRUN = ("-m", "--multirun")


def run(verb: str, arguments: list[str]) -> int:
    """Compose the verb's configuration and run its job, once or over a sweep."""
    quiet_bars()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors come to us instead of to the terminal
    import hydra
    from hydra.core.plugins import Plugins

    from hydra_plugins.oled_sweeps import OledLauncher, OledSweeper
    from oled.cli import jobs, overrides, schema

    for plugin in (OledLauncher, OledSweeper):
        Plugins.instance().register(plugin)
    schema.register()
    failures: list[Exception] = []
    main = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)
    with _folder_of(verb, overrides.rewrite(verb, arguments)) as words:
        sys.argv = [f"oled {verb}", *words]
        try:
            main(functools.partial(jobs.run, verb, failures))()
            if failures:
                raise failures[0]
        except Exception as error:
            line = overrides.complaint(error, verb)
            if line is None:
                raise
            raise line from error
    return 0


@contextmanager
def _folder_of(verb: str, words: list[str]) -> Iterator[list[str]]:
    """Claim the run's folder, a new one where none is given; the words with it are what runs.

    Raises UserError where another run is writing to the folder given.
    """
    from oled.results.claims import claimed, new_folder

    given = [word.removeprefix("out=").strip("'\"") for word in words if word.startswith("out=")]
    looks = bool({*LOOKS} & {*words}) or any("dir=" in word for word in words if "hydra." in word)
    if looks or (given and "${" in given[-1]):
        yield words
        return
    if given:
        folder = Path(given[-1])
    else:
        folder = new_folder(Path("outputs", verb), f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
        words = [*words, f"out={folder}"]
    with claimed(folder, is_new=not given):
        yield words


def quiet_bars() -> None:
    """Show no bars of transformers, which do not ask, where nobody watches."""
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def log_to_stderr() -> None:
    logger = logging.getLogger("oled")
    logger.setLevel(logging.INFO)
    logger.handlers = [logging.StreamHandler()]
