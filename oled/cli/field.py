"""`oled field`: predictions beside what people measured, and profiles of hosts they probed."""

from __future__ import annotations

import argparse
from pathlib import Path

from oled.cli.usage import UsageError
from oled.errors import nearest

VERBS = {"field": "predict decode speeds that people measured, from their machines and settings"}

USAGE = """oled field predict TABLE.csv [hosts=HOSTS.csv] out=DIR
       oled field add REPORT.yaml [to=TABLE.csv]
       oled field host gpu=NAME [cpu=NAME] [link=GB/s] [read=GB/s] [both=GB/s] out=FILE.yaml"""

EPILOG = """\
predict    one prediction a row, DIR/predictions.csv and a summary; measured values are not used
  hosts=HOSTS.csv   the probes of a bench's hosts
  out=DIR           where predictions.csv goes
add        one report of your own: appended to a table, and its prediction beside it
  to=TABLE.csv      the table (default: reports.csv), in the form that predict reads
host       a hardware profile of a host that was probed, for hardware=FILE.yaml
  gpu=, cpu=        parts by name, for all that is not measured
  link=, read=, both=   measured GB/s: copies to the GPU, the CPU's reads, the sum of both at once

docs/field.md describes the tables' columns and the report's keys.
"""

KEYS = {
    "predict": ("hosts", "out"),
    "add": ("to",),
    "host": ("gpu", "cpu", "link", "read", "both", "out"),
}


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb's help."""
    verbs.add_parser(
        "field",
        help=VERBS["field"],
        usage=USAGE,
        description=f"{VERBS['field'].capitalize()}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(_: str, arguments: list[str]) -> int:
    """Run `oled field ARGUMENTS`; returns the exit code."""
    action = arguments[0] if arguments else ""
    if action not in KEYS:
        raise UsageError(f"oled field {action or '…'}: {nearest(action, KEYS)}")
    words = [word for word in arguments[1:] if "=" not in word]
    given = dict(word.partition("=")[::2] for word in arguments[1:] if "=" in word)
    for key, value in given.items():
        if key not in KEYS[action]:
            raise UsageError(f"there is no key '{key}'; {nearest(key, KEYS[action])}")
        if not value:
            raise UsageError(f"'{key}=' has no value")
    if action == "host":
        return _host(words, given)
    if len(words) != 1:
        what = "TABLE.csv" if action == "predict" else "REPORT.yaml"
        raise UsageError(f"oled field {action} {what}: name one file")
    return _predict(Path(words[0]), given) if action == "predict" else _add(Path(words[0]), given)


def _predict(table: Path, given: dict[str, str]) -> int:
    from oled.field.judge import summary
    from oled.field.predict import predict, write
    from oled.field.tables import read_rows

    if "out" not in given:
        raise UsageError("out=DIR must be given")
    rows = read_rows(table, Path(given["hosts"]) if "hosts" in given else None)
    found = predict(rows)
    file = write(found, Path(given["out"]))
    print(summary(found))
    print(file)
    return 0


def _host(words: list[str], given: dict[str, str]) -> int:
    from oled.atomic import write_text
    from oled.field.hosts import Probes, as_yaml, profile

    if words or "gpu" not in given or "out" not in given:
        raise UsageError("oled field host: gpu=NAME and out=FILE.yaml must be given, as key=value")
    rates = {}
    for key in ("link", "read", "both"):
        try:
            rates[key] = float(given[key]) if key in given else None
        except ValueError:
            raise UsageError(f"{key}={given[key]}: it is a number, GB/s") from None
    found = profile(given["gpu"], given.get("cpu", ""), Probes(**rates))
    print(write_text(given["out"], as_yaml(found)))
    return 0


def _add(report: Path, given: dict[str, str]) -> int:
    from oled.field.add import add

    print(add(report, Path(given.get("to", "reports.csv"))))
    return 0
