"""The verbs that look at something: check, stats, list, plot, import, bench. Plain arguments."""

from __future__ import annotations

import argparse

VERBS: dict[str, str] = {}


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pass
