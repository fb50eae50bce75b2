"""What a multirun does beyond its jobs: one table of all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from oled.errors import UserError
from oled.results import table as results


class SweepFolder(Callback):
    """Remembers where the sweep goes, claims it, and clears the results of an older one there.

    The table is written outside the callback: Hydra turns a callback's errors into warnings.
    """

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepFolder.path = Path(config.hydra.sweep.dir)
        try:
            self._claim = results.claim(SweepFolder.path)
        except UserError as error:
            sys.exit(f"oled: {error}")  # Hydra lets this pass
        results.clear_sweep(SweepFolder.path)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        os.close(self._claim)


def finish(folder: Path) -> int:
    """Writes and prints the table of a sweep; names the failed jobs and returns the exit code."""
    table = results.gather_sweep(folder)
    print(results.as_text(table.assign(job=_what_varies(table["overrides"])), ["job"]))
    print(folder / results.TABLE)
    failed = table[table["error"].notna()]
    for row in failed.itertuples():
        print(f"oled: job {row.job} ({row.overrides}) failed: {row.error}", file=sys.stderr)
    return 1 if len(failed) else 0


def _what_varies(overrides: pd.Series[str]) -> list[str]:
    """The overrides of each job, less those that all jobs have."""
    words = [line.split() for line in overrides]
    known = [set(line) for line in words if line]  # a lost job has none
    common = set.intersection(*known) if known else set()
    return [" ".join(word for word in line if word not in common) for line in words]
