"""The verbs that run many simulations: sweep, reproduce, report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oled.cli import runs
from oled.cli.keys import KEYS
from oled.cli.usage import UsageError
from oled.cli.verbs import Arguments, Subparsers, add_verb, help_of, read_words
from oled.errors import nearest
from oled.keys import help_lines
from oled.paths import studies

if TYPE_CHECKING:
    import pandas as pd

VERBS = {
    "sweep": "simulate the product of axes on all cores or a cluster, one row a configuration",
    "reproduce": "a study of the paper's figures: its sweep, its plot, ours beside the paper's",
    "report": "gather tables and figures of a folder into one HTML page",
}


def add_verbs(verbs: Subparsers[argparse.ArgumentParser]) -> None:
    sweep = add_verb(verbs, "sweep", VERBS["sweep"], _sweep)
    sweep.formatter_class = argparse.RawDescriptionHelpFormatter
    sweep.add_argument(
        "words",
        metavar="key=value[,value...]",
        nargs="*",
        help="any key of oled simulate, several values are an axis; experiment=NAME|FILE.yaml: "
        "the axes in its `hydra.sweeper.params`. The same as oled simulate -m, in "
        "outputs/sweep/NAME unless out=DIR says otherwise",
    )
    sweep.epilog = help_of("simulate")

    reproduce = add_verb(verbs, "reproduce", VERBS["reproduce"], _reproduce)
    reproduce.formatter_class = argparse.RawDescriptionHelpFormatter
    reproduce.add_argument("name", metavar="NAME", nargs="?", help="of a study, or all")
    reproduce.add_argument("words", metavar="key=value", nargs="*", help="see below")
    reproduce.add_argument(
        "--small", action="store_true", help="a small preset, for a look and for tests"
    )
    reproduce.add_argument(
        "--redraw", action="store_true", help="figure and table anew; nothing is simulated"
    )
    keys = help_lines(KEYS["reproduce"])
    reproduce.epilog = "\n".join(["keys:", *keys, "", f"studies: {', '.join(studies())}"])

    report = add_verb(verbs, "report", VERBS["report"], _report)
    report.add_argument(
        "folder", metavar="DIR", type=Path, help="results of studies or sweeps, to DIR/report.html"
    )


def _sweep(arguments: Arguments) -> int:
    words: list[str] = arguments.words
    if not any("=" in word for word in words):
        raise UsageError("experiment=NAME or an axis must be given; 'oled sweep --help' says more")
    if not any(word.startswith("out=") for word in words):
        names = [word.partition("=")[2] for word in words if word.startswith("experiment=")]
        words = [*words, f"out=outputs/sweep/{Path(names[-1]).stem if names else 'axes'}"]
    runs.log_to_stderr()
    return runs.run("simulate", ["--multirun", *words])


def _reproduce(arguments: Arguments) -> int:
    from oled.studies.reproduce import reproduce
    from oled.sweeps import Workers

    name = arguments.name
    if name is None or "=" in name:
        raise UsageError(f"name one study, or all; known: {', '.join(studies())}")
    if name not in (*studies(), "all"):
        raise UsageError(f"there is no study '{name}'; {nearest(name, studies())}")
    values = read_words(KEYS["reproduce"], arguments.words)
    runs.log_to_stderr()
    failed = 0
    for one in studies() if name == "all" else [name]:
        folder, table = reproduce(
            one,
            Path(values["out"]),
            small=arguments.small,
            redraw=arguments.redraw,
            resume=values["resume"],
            workers=Workers(values["backend"], values["workers"], values["address"]),
        )
        print(folder / "table.md")
        failed |= _failures(table)
    return failed


def _report(arguments: Arguments) -> int:
    from oled.results.report import report

    print(report(arguments.folder))
    return 0


def _failures(table: pd.DataFrame) -> int:
    """Name what failed; return the exit code."""
    from oled.results.table import failures

    lines = failures(table)
    for line in lines:
        print(f"oled: {line}", file=sys.stderr)
    return 1 if lines else 0
