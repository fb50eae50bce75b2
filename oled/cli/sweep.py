"""What a multirun does beyond its jobs: one table of all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from oled import results


class SweepFolder(Callback):
    """Remembers where the sweep goes, and clears the results of an older one there.

    The table is written outside the callback: Hydra turns a callback's errors into warnings.
    """

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SweepFolder.path = Path(config.hydra.sweep.dir)
        results.clear_sweep(SweepFolder.path)


def finish(folder: Path) -> int:
    """Writes and prints the table of a sweep; names the failed jobs and returns the exit code."""
    table = results.gather_sweep(folder)
    print(results.as_text(table, ["overrides"]))
    print(folder / results.TABLE)
    failed = table[table["error"].notna()]
    for row in failed.itertuples():
        print(f"oled: job {row.job} ({row.overrides}) failed: {row.error}", file=sys.stderr)
    return 1 if len(failed) else 0
