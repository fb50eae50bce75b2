"""Every shipped composition loads, runs, and decides the same compiled, in Python, without JIT."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered.split.fitting import fitting

from oled.errors import UserError
from oled.policies import retention
from oled.policies.composition import Composition, composition_names, load_composition
from oled.policies.kernel import Kernel
from oled.policies.part import Part
from oled.sim.api import simulate
from oled.sim.prepared import PreparedTrace
from oled.trace.schema import Geometry
from oled.trace.synthetic import LAYERED, Workload, synthetic_trace, write_synthetic

from .build import in_python

NAMES = composition_names()
TOY = Geometry(
    moe_layers=(1, 2, 3),
    experts_per_layer=(16,) * 3,
    top_k=3,
    expert_bytes=(2**20,) * 3,
    num_layers=4,
    hidden_size=256,
    moe_intermediate_size=128,
)
LOAD = Workload(requests=2, prompt_blocks=2, blocks=2, block_length=8, horizons=2, scores=16)
KERNELS = ("observe", "watch", "allocate", "dispatch", "ask")


@pytest.fixture(scope="module")
def traces() -> tuple[PreparedTrace, PreparedTrace]:
    """What is judged, and what is learned from: other requests of the same made-up model."""
    judged, learned = (synthetic_trace(TOY, LOAD, LAYERED, seed=seed) for seed in (1, 2))
    return PreparedTrace.of(judged), PreparedTrace.of(learned)


def run(
    policy: str | Composition, traces: tuple[PreparedTrace, PreparedTrace], **fields: Any
) -> str:
    """A digest of all that happened: decisions, counts and times."""
    options = {"slots": 5, "staging": 2, "references": False, "plans": True, **fields}
    result = simulate(fitting(traces[0], policy), policy, calibration=traces[1], **options)
    digest = hashlib.sha256(result.forward_ns.tobytes())
    for counted in (*result.replay.tally, *result.replay.cache):
        digest.update(np.ascontiguousarray(counted).tobytes())
    return digest.hexdigest()


def plain(part: Part) -> Part:
    """The part with plain functions for kernels, as a user may write it."""
    own = vars(type(part))
    kernels = [name for name in KERNELS if isinstance(own.get(name), Kernel)]
    if not kernels:
        return part
    functions = {name: staticmethod(in_python(getattr(part, name))) for name in kernels}
    twin = type(type(part).__name__, (type(part),), {"__slots__": (), **functions})
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return twin(**values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_parts_in_python_decide_and_take_the_same(name: str, traces: Any) -> None:
    composition = load_composition(name)
    kinds = ("retention", "allocation", "dispatch", "prefetch")
    parts = {kind: plain(getattr(composition, kind)) for kind in kinds}
    assert run(dataclasses.replace(composition, **parts), traces) == run(name, traces)


def test_nothing_changes_without_jit(traces: Any, tmp_path: Path) -> None:
    for folder, seed in (("judged", 1), ("learned", 2)):
        write_synthetic(tmp_path / folder, TOY, LOAD, LAYERED, seed=seed)
    found = subprocess.run(
        [sys.executable, "-m", "policies.test_compositions", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {name: run(name, traces) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_global_scope_runs_or_says_why_not(name: str, traces: Any) -> None:
    try:
        run(name, traces, scope="global", slots=0.16)
    except UserError as error:
        assert "cache.scope=layer" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", NAMES)
def test_a_composition_is_named_as_its_file_and_described(name: str) -> None:
    composition = load_composition(name)
    assert composition.name == name
    assert composition.description
    assert composition.source
    assert "\n" not in composition.description


def test_every_retention_is_used_by_a_composition() -> None:
    files = {Path(f).stem for p in retention.__path__ for f in Path(p).glob("*.py")}
    used = {type(load_composition(n).retention).__module__.rpartition(".")[2] for n in NAMES}
    assert files - {"__init__"} == used


if __name__ == "__main__":
    folders = Path(sys.argv[1])
    subjects = (PreparedTrace.of(folders / "judged"), PreparedTrace.of(folders / "learned"))
    print(json.dumps({name: run(name, subjects) for name in NAMES}))
