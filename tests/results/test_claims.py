"""Folders of runs: new ones are never shared, and one in use is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from oled.errors import UserError
from oled.results.claims import claimed, new_folder


def test_runs_of_one_second_have_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_folder(tmp_path, "now"), range(40)))
    assert len({*made}) == 40
    assert all(folder.is_dir() for folder in made)


def test_a_folder_is_claimed_once_and_a_new_empty_one_goes(tmp_path):
    (tmp_path / "old").mkdir()
    with claimed(tmp_path / "old"), claimed(tmp_path / "new"):
        with (
            pytest.raises(UserError, match="another run is writing here"),
            claimed(tmp_path / "old"),
        ):
            pass
        assert (tmp_path / "old").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    with claimed(tmp_path / "old"):
        pass
