"""backend=cpu: outputs of the resident run, decisions of the simulator, errors in one line."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oled.errors import UserError
from oled.live.backends import LaneError
from oled.live.backends.cpu import Cpu, cpu_kind
from oled.live.backends.host_experts import OnDisk
from oled.live.backends.kinds import EMULATED
from oled.live.direct_io import BLOCK_BYTES, DirectReader, measured_depth
from oled.live.executor import Executor
from oled.live.expert_file import HEADER_BYTES, ExpertFile
from oled.live.kernels import SILU, ExpertForm
from oled.live.store import HostStore, page_aligned
from oled.models.catalogue import model_geometry
from tests.live.build import RESIDENT, demo, run
from tests.live.configured import configured, prefetching

ON_DEMAND = ("naive_lru", "lru", "oled", "cpu_all", "fiddler", "static_popularity")
ODD = ExpertForm(24, 17, False, False, SILU, 0.0, 0.0)
"""Its 1,224 numbers are no whole blocks."""


@pytest.fixture(scope="module")
def few():
    return demo(forwards=5)


@pytest.fixture(scope="module")
def whole(few):
    return run(few, RESIDENT, 128).outputs


@pytest.fixture(scope="module")
def on_disk(few, tmp_path_factory):
    """The same experts in a file, and the backend that reads it."""
    routing, store, costs = few
    path = tmp_path_factory.mktemp("experts") / "experts.bin"
    file = ExpertFile.random(path, store.form, store.num_experts, 0)
    return (routing, file, costs), cpu_kind("storage", path)


@pytest.fixture(params=["memory", "storage"])
def linked(request, few, on_disk):
    """(configuration, backend) of each link."""
    return on_disk if request.param == "storage" else (few, cpu_kind("memory", None))


def no_lane_lives():
    return not [t for t in threading.enumerate() if t.name.startswith("oled-")]


@pytest.mark.parametrize("policy", ON_DEMAND)
def test_outputs_are_the_resident_runs_and_decisions_the_simulators(linked, whole, policy):
    ready, kind = linked
    chosen = configured(ready, policy, 20)
    live = chosen.live(kind=kind)
    assert live.outputs == whole
    tally = chosen.simulated().tally
    assert np.array_equal(tally.plans, live.plans.plans)
    assert np.array_equal(tally.orders, live.plans.orders)
    assert no_lane_lives()


@pytest.mark.parametrize("policy", ["oled_fill", "promoe", "hybrimoe", "prefetch_dial"])
def test_prefetches_leave_outputs_and_decisions(linked, whole, policy):
    assert policy in prefetching()
    ready, kind = linked
    chosen = configured(ready, policy, 20)
    live = chosen.live(kind=kind)
    assert live.outputs == whole
    assert chosen.difference(live) is None
    assert len(live.link)


def test_with_one_staging_slot_and_no_resident_every_expert_passes_through_it(linked, whole):
    ready, kind = linked
    assert run(ready, "naive_lru", 0, kind=kind, staging=1).outputs == whole


def test_a_lane_that_does_not_wait_for_a_landing_gets_nan(linked, monkeypatch):
    ready, kind = linked

    def told_before_it_lands(self, work):
        for position in work.transfers:
            _, slot = work.vacant.get()
            target, row = self._device[slot], int(work.row[position])
            self._experts.copy(row, slot, target, 0, self.store.form.size)
            work.slot[position] = slot
            work.landed.put((work.begin, int(position)))
            time.sleep(0.002)
            self._experts.land(row, slot, target)
        return time.perf_counter_ns()

    monkeypatch.setattr(Cpu, "_copy_all", told_before_it_lands)
    wrong = run(ready, "lru", 20, kind=kind).outputs
    assert any(np.isnan(step).any() for step in wrong.steps)


def test_costs_are_those_of_the_numbers_that_are_copied(linked):
    _, kind = linked
    model = model_geometry("llada2_mini")
    assert kind.as_kept(model).expert_bytes == 4 * model.expert_params == 2 * model.expert_bytes
    assert EMULATED.as_kept(model) is model
    assert kind.as_kept(None) is None


def test_work_is_the_time_that_jobs_took(linked):
    ready, kind = linked
    live = run(ready, "oled", 20, kind=kind)
    kinds = live.entries[:, 0]
    for lane, logged in ((0, (2, 3)), (1, (4, 5)), (3, (6,))):
        mine = live.entries[np.isin(kinds, logged)]
        assert int((mine[:, 2] - mine[:, 1]).sum()) == int(live.work_ns[:, lane].sum()) > 0
    assert (live.entries[:, 2] >= live.entries[:, 1]).all()


# The file


def test_the_file_has_the_experts_of_the_store_and_is_used_again(tmp_path):
    counts = np.array([3, 5])
    file = ExpertFile.random(tmp_path / "new" / "e.bin", ODD, counts, 7)
    store = HostStore.random(ODD, counts, 7)
    read = page_aligned(file.row_bytes)
    with DirectReader(file.path, 2) as reader:
        for row in range(8):
            reader.read(file.offset(row), [read])
            numbers = read.view(np.float32)[: ODD.size]
            assert np.array_equal(numbers, store.block[row])
    assert file.row_bytes == 8192
    assert file.path.stat().st_size == HEADER_BYTES + 8 * 8192 == file.file_bytes
    written = file.path.stat().st_mtime_ns
    assert ExpertFile.random(file.path, ODD, counts, 7).path.stat().st_mtime_ns == written
    assert [p.name for p in file.path.parent.iterdir()] == ["e.bin"]


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_pieces_of_a_row_make_the_whole_row(tmp_path, pieces):
    file = ExpertFile.random(tmp_path / "e.bin", ODD, np.array([2]), 0)
    source = OnDisk(file, 1)
    source.open(1)
    target = page_aligned(file.row_bytes).view(np.float32)
    target[:] = np.nan
    for piece in range(pieces):
        source.copy(1, 0, target, ODD.size * piece // pieces, ODD.size * (piece + 1) // pieces)
        assert np.isnan(target[0])
    source.land(1, 0, target)
    source.close()
    assert np.array_equal(target[: ODD.size], HostStore.random(ODD, np.array([2])).block[1])


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_read_of_any_depth_fills_its_targets_in_order(tmp_path, depth):
    path = tmp_path / "numbers"
    content = np.random.default_rng(0).integers(0, 256, 13 * BLOCK_BYTES, np.uint8)
    path.write_bytes(content.tobytes())
    first, second = page_aligned(BLOCK_BYTES), page_aligned(9 * BLOCK_BYTES)
    with DirectReader(path, depth) as reader:
        reader.read(2 * BLOCK_BYTES, [first, second])
    found = np.concatenate([first, second])
    assert np.array_equal(found, content[2 * BLOCK_BYTES : 12 * BLOCK_BYTES])
    assert measured_depth(path, BLOCK_BYTES, 13) in (1, 2, 4, 8)


def test_memory_that_is_not_aligned_is_refused_by_the_system(tmp_path):
    """So the reads are direct: an ordinary read would take any memory."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(4 * BLOCK_BYTES))
    crooked = page_aligned(2 * BLOCK_BYTES)[1 : 1 + BLOCK_BYTES]
    with DirectReader(path, 1) as reader, pytest.raises(UserError, match="Invalid argument"):
        reader.read(0, [crooked])


def test_every_slot_and_row_is_aligned(on_disk):
    (_, file, costs), kind = on_disk
    backend = kind.make(file, 3, costs, False)
    backend.open(None)
    try:
        assert [slot.ctypes.data % BLOCK_BYTES for slot in backend._device] == [0, 0, 0]
    finally:
        backend.close()
    assert [file.offset(row) % BLOCK_BYTES for row in range(3)] == [0, 0, 0]


# What goes wrong


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "removed while the run read it"),
        (lambda path: path.rename(path.with_name("away")), "removed while the run read it"),
        (lambda path: _replace(path), "changed or replaced while the run read it"),
        (lambda path: _cut(path), "changed or replaced while the run read it"),
    ],
)
@pytest.mark.parametrize("policy", ["lru", "cpu_all"])
def test_a_file_that_is_harmed_while_the_run_reads_it(
    few, tmp_path, monkeypatch, harm, message, policy
):
    routing, store, costs = few
    path = tmp_path / "experts.bin"
    file = ExpertFile.random(path, store.form, store.num_experts, 0)
    forwards = []
    begin = Executor.begin_forward

    def harming(self, at):
        forwards.append(at.forward)
        if len(forwards) == 3:
            harm(path)
        begin(self, at)

    monkeypatch.setattr(Executor, "begin_forward", harming)
    with pytest.raises(LaneError, match=message) as raised:
        run((routing, file, costs), policy, 10, kind=cpu_kind("storage", path))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "UserError" not in str(raised.value)
    assert no_lane_lives()


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 5000)


def test_a_read_past_the_end_names_the_byte(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(BLOCK_BYTES))
    with (
        DirectReader(path, 1) as reader,
        pytest.raises(UserError, match="the file ends at byte 4096, 8192 bytes too early"),
    ):
        reader.read(0, [page_aligned(3 * BLOCK_BYTES)])


def test_a_file_that_was_cut_short_before_the_run(tmp_path):
    file = ExpertFile.random(tmp_path / "e.bin", ODD, np.array([2]), 0)
    with file.path.open("r+b") as short:
        short.truncate(file.file_bytes - 1)
    with pytest.raises(UserError, match=r"20,479 bytes, 20,480 are expected"):
        ExpertFile.random(file.path, ODD, np.array([2]), 0)


@pytest.mark.parametrize("other", [{"seed": 1}, {"num_experts": np.array([3])}])
def test_a_file_of_other_experts_is_not_used(tmp_path, other):
    known = {"path": tmp_path / "e.bin", "form": ODD, "num_experts": np.array([2]), "seed": 0}
    ExpertFile.random(**known)
    with pytest.raises(UserError, match="holds other experts"):
        ExpertFile.random(**{**known, **other})


def test_a_full_disk_is_told_before_and_while_it_fills(tmp_path, monkeypatch):
    from oled.live import expert_file

    usage = expert_file.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(expert_file.shutil, "disk_usage", lambda _: usage._replace(free=20_479))
        with pytest.raises(UserError, match="20,480 bytes are needed, 20,479 are free"):
            ExpertFile.random(tmp_path / "e.bin", ODD, np.array([2]), 0)

    def full(rows: range) -> Iterator[int]:
        yield rows[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"e\.bin: No space left on device"):
        ExpertFile.random(tmp_path / "e.bin", ODD, np.array([2]), 0, full)
    assert list(tmp_path.iterdir()) == []


def test_what_the_file_system_refuses_is_told(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="there is no such file"):
        DirectReader(tmp_path / "none", 1)

    def no_direct(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("oled.live.direct_io.os.open", no_direct)
    with pytest.raises(UserError, match="has no direct I/O"):
        DirectReader(tmp_path / "none", 1)


def test_a_policy_that_writes_experts_back_needs_memory(on_disk):
    ready, kind = on_disk
    with pytest.raises(UserError, match="only read; take link=memory"):
        run(ready, "tide_artefact", 20, kind=kind)
    assert no_lane_lives()


def test_a_budget_that_is_too_small_is_refused_before_anything_is_allocated(linked, monkeypatch):
    ready, kind = linked
    monkeypatch.setattr("oled.live.backends.kind.free_host_memory", lambda: 65 * 2**20)
    with pytest.raises(UserError, match=r"take a smaller model or fewer cache\.slots"):
        run(ready, "lru", 100, kind=kind)


@pytest.mark.parametrize(
    ("link", "file", "message"),
    [
        ("disk", None, "link=disk is not known"),
        ("storage", None, "give expert_file=FILE"),
        ("memory", Path("e.bin"), "link=storage only"),
    ],
)
def test_links_that_make_no_sense(link, file, message):
    with pytest.raises(UserError, match=message):
        cpu_kind(link, file)
