"""Files and folders appear whole or not at all, and only `oled.atomic` renames them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from oled.atomic import replaced_file, whole_folder, write_bytes, write_text

PACKAGE = Path(__file__).parents[2] / "oled"


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    file = write_text(tmp_path / "a.txt", "old")
    with replaced_file(file, sync=True) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert write_bytes(tmp_path / "b", b"\0").read_bytes() == b"\0"
    assert file.read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b"}


def _fill_half(manager: AbstractContextManager[Path]) -> None:
    with manager as temporary:
        (temporary / "half").touch() if temporary.is_dir() else temporary.write_text("half")
        raise KeyboardInterrupt


def test_after_an_error_the_old_file_stays(tmp_path: Path) -> None:
    file = write_text(tmp_path / "a.txt", "old")
    with pytest.raises(KeyboardInterrupt):
        _fill_half(replaced_file(file))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_after_an_error_no_folder_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fill_half(whole_folder(tmp_path / "new"))
    assert not list(tmp_path.iterdir())


def _occupy(place: Path, as_file: bool) -> None:
    if as_file:
        place.write_text("theirs")
    else:
        place.mkdir()
        (place / "theirs").touch()


def _write_ours(place: Path, meanwhile: Callable[[], None]) -> None:
    with whole_folder(place) as folder:
        (folder / "ours").touch()
        meanwhile()


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_what_lies_there_is_left_alone(tmp_path: Path, before: bool, as_file: bool) -> None:
    place = tmp_path / "new"
    if before:
        _occupy(place, as_file)
    with pytest.raises(FileExistsError, match="new"):
        _write_ours(place, lambda: None if before else _occupy(place, as_file))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert place.is_file() or [path.name for path in place.iterdir()] == ["theirs"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with whole_folder(tmp_path / "new") as folder:
        (folder / "ours").touch()
    assert (tmp_path / "new" / "ours").is_file()


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (
            r"\.rename\(|os\.replace\(|getpid\(\)\}|with_suffix\(.\.(new|tmp)",
            {"atomic.py", "trace/parts.py"},
        ),
        (r"^(Ints|Floats|Doubles|Bools|Array|Flags|Mask) = NDArray", {"types.py"}),
    ],
)
def test_one_place(pattern: str, home: set[str]) -> None:
    """No file renames by hand, or names types of arrays again."""
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found <= home
