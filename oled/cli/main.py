"""`oled VERB …`: find the verb, run it, and turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence

from oled import __version__
from oled.cli import field, inspection, runs, sizing, studies, traces
from oled.cli.usage import UsageError
from oled.cli.verbs import add_key_verb
from oled.errors import UserError, nearest

DONE, BAD_INPUT, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

EPILOG = """\
Runs (record, simulate, run, …) take key=value; -m makes a sweep of comma-separated values.
'oled VERB --help' says which keys there are. Exit codes: 0 done, 1 bad input or result, 2 usage.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oled",
        description="Which experts of a mixture-of-experts model should stay on the GPU?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"oled {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for module in (sizing, runs):
        for verb, summary in module.VERBS.items():
            add_key_verb(verbs, verb, summary)
    studies.add_verbs(verbs)
    field.add_verbs(verbs)
    inspection.add_verbs(verbs)
    traces.add_verbs(verbs)
    return parser


def _verb(argv: Sequence[str]) -> Callable[[], int]:
    """Return the verb's function with its arguments read."""
    modules = (sizing, runs, studies, field, inspection, traces)
    known = [verb for module in modules for verb in module.VERBS]
    word = argv[0] if argv else ""
    if word and not word.startswith("-") and word not in known:
        raise UsageError(f"there is no verb '{word}'; {nearest(word, known)}")
    rest = list(argv[1:])
    for module in (sizing, runs, field):
        if word in module.VERBS and not {"-h", "--help"} & set(rest):
            return functools.partial(module.run, word, rest)
    args = _parsed(argv)
    return lambda: args.run(args)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of a verb with a parser; words may stand on both sides of an option.

    argparse alone ends a list of words at the first option.
    """
    parser = _parser()
    args, later = parser.parse_known_args(argv)
    words = next((vars(args)[name] for name in ("words", "options") if name in args), None)
    if later and (words is None or any(word.startswith("-") for word in later)):
        parser.error(f"unrecognized arguments: {' '.join(later)}")
    if words is not None:
        words.extend(later)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script and return the exit code."""
    try:
        return _verb(sys.argv[1:] if argv is None else argv)()
    except UsageError as error:
        print(f"oled: {error}", file=sys.stderr)
        return BAD_USAGE
    except (UserError, OSError) as error:
        if isinstance(
            error, BrokenPipeError
        ):  # the reader of our output has gone, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        print(f"oled: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("oled: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
