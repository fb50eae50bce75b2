"""Share what all verbs need: parsers for `--help`, and plain key=value words."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from oled.cli.keys import COMPOSED, KEYS, OUT
from oled.cli.usage import UsageError
from oled.errors import nearest
from oled.keys import REQUIRED, Key, help_lines
from oled.paths import conf_dir

Arguments = argparse.Namespace
Subparsers = argparse._SubParsersAction

FLAGS = """
  -m, --multirun                 sweep over comma-separated values, range(…), choice(…), glob(…);
                                 OUT/results.parquet has a row for each
  --cfg job                      print the configuration and stop
"""


def add_verb(
    verbs: Subparsers[argparse.ArgumentParser],
    verb: str,
    summary: str,
    run: Callable[[Arguments], int],
    *,
    json_too: bool = False,
    partial: bool = False,
) -> argparse.ArgumentParser:
    """Add a verb's parser; `run` gets the parsed arguments and returns the exit code."""
    parser = verbs.add_parser(verb, help=summary, description=_sentence(summary))
    if json_too:
        parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    if partial:
        parser.add_argument("--partial", action="store_true", help="read what a crash has left")
    parser.set_defaults(run=run)
    return parser


def add_key_verb(verbs: Subparsers[argparse.ArgumentParser], verb: str, summary: str) -> None:
    """Add a parser that prints the help of a verb's keys; `oled.cli.main` reads the words."""
    verbs.add_parser(
        verb,
        help=summary,
        usage=f"oled {verb} [key=value ...]",
        description=_sentence(summary),
        epilog=help_of(verb),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def help_of(verb: str) -> str:
    """Return the keys of a verb, and the bundled options of its groups."""
    if verb not in COMPOSED:
        return "\n".join(["keys:", *help_lines(KEYS[verb])])
    groups = [one.name for one in KEYS[verb] if one.is_group]
    groups += ["cache", "experiment"] if verb == "simulate" else []
    bundled = [
        textwrap.fill(
            ", ".join(names), 100, initial_indent=f"  {group}: ", subsequent_indent="    "
        )
        for group in groups
        if (names := options(group))
    ]
    keys = help_lines((*KEYS[verb], OUT))
    sweep = help_lines(KEYS["sweep"])
    return "\n".join(["keys:", *keys, FLAGS, "of a sweep:", *sweep, "", "bundled:", *bundled])


def options(group: str) -> list[str]:
    """Return the bundled options of a configuration group."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def split_words(words: Iterable[str]) -> dict[str, str]:
    """Return key=value words as a mapping. Raises UsageError for other words."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"'{word}' is not key=value")
        pairs[name] = value
    return pairs


def read_words(keys: Sequence[Key], words: Iterable[str]) -> dict[str, Any]:
    """Return the value of every key by its field, of its type.

    Raises UsageError for unknown keys, values of another type and keys that must be given.
    """
    known = {one.name: one for one in keys}
    for word in words:
        name = word.partition("=")[0]
        if name not in known:
            raise UsageError(f"there is no key '{name}'; {nearest(name, known)}")
    given = split_words(words)
    values = {}
    for name, one in known.items():
        value = _typed(one, given[name]) if name in given else one.default
        if value == REQUIRED:
            raise UsageError(f"{name} must be given")
        values[one.field] = value
    return values


def _typed(one: Key, text: str) -> Any:
    value: Any = text
    if int in one.types:
        if not text.isdecimal():
            raise UsageError(f"{one.name}={text} is no whole number")
        value = int(text)
    elif bool in one.types and text in ("true", "false"):
        value = text == "true"
    try:
        one.check(value)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return value
