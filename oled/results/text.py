"""Tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def aligned(
    rows: Iterable[Sequence[str]],
    headers: Sequence[str] = (),
    *,
    right: int | None = None,
    indent: str = "",
) -> str:
    """Return rows in aligned columns; the columns from number `right` on stand at the right."""
    cells = [list(row) for row in rows]
    count = max((len(row) for row in [headers, *cells]), default=0)
    sides = ["left" if right is None or n < right else "right" for n in range(count)]
    text = tabulate(
        cells,
        headers,
        tablefmt="plain",
        colalign=sides if cells else None,
        disable_numparse=True,
        preserve_whitespace=True,
    )
    return "\n".join(f"{indent}{line}".rstrip() for line in text.splitlines())
