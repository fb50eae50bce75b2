"""What the verbs with plain arguments have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Arguments = argparse.Namespace
Subparsers = argparse._SubParsersAction


def add_verb(
    verbs: Subparsers[argparse.ArgumentParser],
    verb: str,
    summary: str,
    run: Callable[[Arguments], int],
    *,
    json_too: bool = False,
    partial: bool = False,
) -> argparse.ArgumentParser:
    """A verb's parser; `run` gets the parsed arguments and returns the exit code."""
    parser = verbs.add_parser(verb, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    if json_too:
        parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    if partial:
        parser.add_argument("--partial", action="store_true", help="read what a crash has left")
    parser.set_defaults(run=run)
    return parser
