"""Damaged traces and recordings by the thousand: nothing but a TraceError may come of them.

    python tests/trace/fuzz.py SECONDS [SEED]

A case is a number: it chooses a target, a file and some damage, all at random from that seed. Cases
run in a process of their own with bounded memory and time, so that a crash or a hang has a number,
too. `run_case(number, folder)` repeats one; the tests run the first few hundred.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent))
from small import diffusion, geometry, manifest, write
from sources import (
    count_record,
    npy_base64,
    physical_ids,
    routed,
    save_dump,
    save_safetensors,
    save_stat,
    sglang_response,
    token_arrays,
    token_record,
    vllm_response,
    write_json,
    write_lines,
)

from oled.trace import Prediction, RouterScores, TraceError, batch, build_steps, load
from oled.trace.check import check
from oled.trace.cut import slice_trace
from oled.trace.files import file_sha256
from oled.trace.importers import import_trace
from oled.trace.merge import merge_traces
from oled.trace.view import reader

SECONDS, MEMORY = 30, 12 << 30
NASTY = (
    None, True, -1, 0, 1, 2**16, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "..",
    "/etc/passwd", "a\0b", "\ud800", "x" * 70000, [], {}, [[]], [None], {"a": {}}, "NaN", [-1] * 9,
)  # fmt: skip
FACTS = {"experts": 8, "expert_bytes": 1000, "top_k": 2}
SHAPED = FACTS | {"layers": 4}
Files = dict[str, bytes]


# --- undamaged files ------------------------------------------------------------------------------


@cache
def traces() -> Files:
    """A trace with all side tables, in several parts."""
    said = (Prediction("gate", 1, 2, np.array([3, 4]), np.array([0.5, 0.25])),)
    shape = geometry(zero_experts=1)
    records = [
        replace(one, predictions=said, scores=RouterScores(one.expert_ids, one.weights))
        for one in diffusion(shape, requests=3, interleaved=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "t", manifest(shape), records, rows_per_part=80)
        return {file.name: file.read_bytes() for file in (Path(folder) / "t").iterdir()}


@cache
def recordings() -> list[tuple[str, dict[str, Any], Files]]:
    """(format, options, files) of each kind of recording."""
    rng = np.random.default_rng(0)
    ids, array = physical_ids(rng, 5, 6), routed(rng, 7)
    token = [token_record(n, 0, ids, [0, 1, 2, 0, 1], n) for n in (1, 2)]
    counts = rng.integers(0, 4, (3, 4, 8))
    lines = [
        {"layer_idx": la, "token_idx": t, "selected_ids": [la, t], "gate_weights": [0.7, 0.3]}
        for t in range(4)
        for la in (4, 5)
    ]
    batches = [{"layer": n % 2, "topk_experts": [[n, 7], [3, n]]} for n in (0, 1, 2)]
    logits = {f"l{n}": rng.normal(size=(6, 8)).astype(np.float32) for n in (1, 2)}
    tuples = (None, *map(torch.from_numpy, logits.values()))
    vllm = vllm_response(array[:4].tolist(), npy_base64(array[4:]), prompt_token_ids=[1, 2, 3, 4])
    csv = "layer,expert\n" + "".join(f"{la},{la}\n{la},0\n" for la in (1, 2, 3) * 4)
    route = (
        "# route_trace v1\n# model=toy n_layer=2 n_expert=4 n_expert_used=2\n"
        "# layer=0 expert_bytes=100 dense_bytes=7\n# layer=1 expert_bytes=90 dense_bytes=6\n"
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
        + "".join(
            f"0,{int(s > 1)},{s},{la},{k},{k + la},0.5,0,90\n"
            for s in range(4)
            for la in (0, 1)
            for k in (0, 1)
        )
    )
    meta = json.dumps({"model": "toy", "k": 2, "num_experts": 8, "n_moe_layers": 3})
    sglang, text = sglang_response(array, 4), array.swapaxes(0, 1)[1:]
    made: list[tuple[str, dict[str, Any], Callable[[Path], object]]] = [
        ("sglang_dump", FACTS | {"top_k": 6}, lambda p: save_dump(p, 0, token)),
        ("sglang_dump", FACTS, lambda p: save_dump(p, 0, [count_record(1, 0, ids)])),
        ("sglang_dump", FACTS | {"tp_size": 1}, lambda p: save_stat(p / "s.pt", counts)),
        ("sglang_routed_experts", FACTS, lambda p: np.save(p / "a.npy", array)),
        ("sglang_routed_experts", FACTS, lambda p: np.savez(p / "a.npz", a=array, b=array[:3])),
        ("sglang_routed_experts", SHAPED, lambda p: write_json(p / "a.json", sglang)),
        ("vllm_routed_experts", FACTS, lambda p: write_json(p / "a.json", vllm)),
        ("vllm_routed_experts", FACTS, lambda p: write_lines(p / "a.jsonl", [vllm, vllm])),
        ("llama_cpp", FACTS, lambda p: (p / "a.csv").write_text(csv)),
        ("plain_csv", FACTS | {"layers": 2}, lambda p: (p / "a.csv").write_text("0,1\n2,3\n" * 9)),
        ("topk_experts", FACTS, lambda p: write_lines(p / "a.jsonl", batches)),
        ("jsonl", FACTS, lambda p: write_lines(p / "a.jsonl", lines)),
        ("router_logits", FACTS, lambda p: torch.save(tuples, p / "a.pt")),
        ("router_logits", FACTS, lambda p: np.savez_compressed(p / "a.npz", **logits)),
        ("router_logits", FACTS, lambda p: save_safetensors(p / "a.safetensors", logits, "F32")),
        ("token_arrays", {"expert_bytes": 9}, lambda p: np.savez(p / "a.npz", **token_arrays())),
        ("bigmoeonedge", {}, lambda p: (p / "a.csv").write_text(route)),
        ("cacheable_by_design", {}, lambda p: np.savez(p / "a.npz", experts=text, meta=meta)),
    ]  # fmt: skip
    found = []
    for name, options, make in made:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
        found.append((name, options, files))
    return found


# --- damage ---------------------------------------------------------------------------------------


def flip(rng: random.Random, data: bytes) -> bytes:
    """Some bits, mostly a few, sometimes many, sometimes near the end (Parquet's footer)."""
    changed = bytearray(data)
    begin = max(len(data) - 600, 0) if rng.random() < 0.4 else 0
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
        if changed:
            changed[rng.randrange(begin, len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.7 else data[at:]


def splice(rng: random.Random, data: bytes) -> bytes:
    """A piece in another place, or twice, or of other bytes."""
    if not data:
        return data
    begin, to = rng.randrange(len(data)), rng.randrange(len(data))
    length = rng.choice((1, 4, 8, 64, 500))
    piece = rng.choice((data[begin : begin + length], b"\xff" * length, b"\0" * length))
    keep = to + len(piece) if rng.random() < 0.7 else to
    return data[:to] + piece + data[keep:]


def nest(rng: random.Random, value: Any) -> Any:
    """A JSON value with something nasty somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.1:
            del changed[key]
        else:
            changed[key] = nest(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.95:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:at] + value[at:] * 2
        return [*value[:at], nest(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 7, 1 << 15, 1 << 40))
    return rng.choice(NASTY)


def nest_json(rng: random.Random, data: bytes) -> bytes:
    """One of a file's JSON values changed (of one line, where there are several)."""
    try:
        return json.dumps(nest(rng, json.loads(data))).encode()
    except ValueError:
        lines = data.decode("utf-8", "replace").splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(nest(rng, json.loads(lines[at])))
        return "\n".join(lines).encode()


def nest_tensors(rng: random.Random, data: bytes) -> bytes:
    """One value of a file of torch.save changed; tensors by dtype, shape or content."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return rng.choice(
                (
                    value.float(),
                    value[:1],
                    value[..., :0],
                    value.flatten(),
                    -value,
                    value + (1 << 20),
                    value.expand(*([4] * 3), *value.shape),
                    torch.full_like(value, -1),
                )
            )
        if isinstance(value, list | tuple) and value:
            at = rng.randrange(len(value))
            return [*value[:at], change(value[at]), *value[at + 1 :]]
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            return value | {key: change(value[key])}
        return rng.choice((*NASTY, 3, 5))

    out = io.BytesIO()
    torch.save(change(torch.load(io.BytesIO(data), weights_only=True)), out)
    return out.getvalue()


def damage(rng: random.Random, name: str, data: bytes) -> bytes:
    """A file's bytes with some kind of damage that suits it."""
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.7:
        with contextlib.suppress(ValueError):  # damaged before, and no JSON any more
            return nest_json(rng, data)
    if name.endswith(".pt") and rng.random() < 0.5:
        return nest_tensors(rng, data)
    return rng.choice((flip, flip, cut, splice))(rng, data)


# --- cases ----------------------------------------------------------------------------------------


def damaged_trace(rng: random.Random, folder: Path) -> None:
    files = dict(traces())
    names = sorted(files)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = "trace.json" if rng.random() < 0.3 else rng.choice(names)
        files[name] = damage(rng, name, files[name])
    if rng.random() < 0.1:
        one, other = rng.sample(names, 2)
        files[one], files[other] = files[other], files[one]
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if rng.random() < 0.5:
        seal(folder)


def seal(folder: Path) -> None:
    """Checksums that agree with the damage: only the content is wrong then."""
    try:
        data = json.loads((folder / "trace.json").read_text())
        for part in data["parts"]:
            part["sha256"] = file_sha256(folder / part["file"])
        (folder / "trace.json").write_text(json.dumps(data))
    except (ValueError, TypeError, KeyError, OSError, TraceError):
        return


def read_everything(folder: Path) -> None:
    for action in (
        lambda: check(folder).lines(),
        lambda: batch(build_steps(load(folder, allow_partial=True)), 2),
        lambda: reader(folder, allow_partial=True).read_all(),
        lambda: slice_trace(folder, folder.parent / "s", allow_partial=True),
        lambda: merge_traces([folder, folder], folder.parent / "m", allow_partial=True),
    ):
        try:
            action()
        except TraceError as error:
            if "\n" in str(error) or len(str(error)) > 2000:
                raise AssertionError(f"not one line: {str(error)[:500]!r}") from None


def run_case(number: int, folder: Path) -> None:
    """The case of this number, in an empty folder; a warning is no clear line either."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run_case(number, folder)


def _run_case(number: int, folder: Path) -> None:
    rng = random.Random(number)
    place = folder / "x"
    place.mkdir()
    if rng.random() < 0.5:
        damaged_trace(rng, place)
        read_everything(place)
        return
    name, options, files = rng.choice(recordings())
    for file, data in files.items():
        (place / file).write_bytes(damage(rng, file, data))
    (file,) = place.iterdir()
    try:
        import_trace(name, file, folder / "t", options)
    except TraceError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            raise AssertionError(f"not one line: {str(error)[:500]!r}") from None
        if (folder / "t").exists():
            raise AssertionError("a failed import left a folder") from None
        return
    read_everything(folder / "t")


# --- the long run ---------------------------------------------------------------------------------


def worker(first: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    end = time.monotonic() + seconds
    number = first
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as temp:
        folder = Path(temp) / "case"
        while time.monotonic() < end:
            print(number, flush=True)
            folder.mkdir()
            signal.alarm(SECONDS)
            try:
                run_case(number, folder)
            except Exception:
                print(f"FIND {number}: {traceback.format_exc()!r}", flush=True)
            signal.alarm(0)
            shutil.rmtree(folder)
            number += 1


def main(seconds: float, first: int) -> int:
    end = time.monotonic() + seconds
    finds, number, cases = [], first, 0
    while (left := end - time.monotonic()) > 1:
        command = [sys.executable, __file__, "--worker", str(number), str(min(left, 120))]
        done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started = number
        for line in done.stdout or ():
            if line.startswith("FIND"):
                finds.append(line)
                print(line, flush=True)
            elif line.strip().isdecimal():
                number = int(line)
        if done.wait():
            finds.append(f"{number}: the process ended with {done.returncode}")
            print(finds[-1], flush=True)
        cases += number - started + 1
        number += 1
    print(f"{cases} cases from {first}, {len(finds)} finds", flush=True)
    return bool(finds)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(int(sys.argv[2]), float(sys.argv[3]))
    else:
        sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
