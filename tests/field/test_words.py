"""What reports write: placements, parts by name, and reports of one's own."""

from __future__ import annotations

import pytest

from oled.errors import UserError
from oled.field import parts
from oled.field.add import add, read_report
from oled.field.placement import Placement, placement

REPORT = """\
id: mine-1
engine: llama.cpp
model: gpt-oss-120b
quant: MXFP4
gpu: RTX 5090
gpu_gb: 32
cpu: Ryzen 9 9950X
ram: 2x48GB DDR5-5600 dual channel
experts_on_gpu: --n-cpu-moe 24 of 36
tokens_per_second: 36.4
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--n-cpu-moe 24 of 40 (16 layers on GPU)", Placement("layers", on_cpu=24)),
        ("-ncmoe 61 (43 MoE layers: all on CPU)", Placement("layers", on_cpu=48)),
        ("n-cpu-moe=0 (experts of the first 0 of 24 layers on CPU)", Placement("layers")),
        ("none: -ot exps=CPU", Placement("layers", on_cpu=48)),
        ("-ngl 48 --n-cpu-moe 31 of 48", Placement("layers", on_cpu=31)),
        ("-ngl 18: last 18 whole layers on GPU", None),
        ("no GPU at all", Placement("cpu")),
        ("all on GPU", Placement("resident")),
        ("56/256 experts on GPU (most popular)", Placement("cache", share=56 / 256)),
        ("64 slots per layer, static by profile", Placement("share", share=0.5)),
        ("512 slots = 4.65% of experts (offload)", Placement("cache", share=0.0465)),
        ("GPU expert cache 1,229 slots", Placement("cache", share=1229 / (48 * 128))),
        ("partial (split not in the excerpt)", None),
    ],
)
def test_placements(text, expected):
    found = placement(text, 48, 128, cached=True)
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.kind, found.on_cpu) == (expected.kind, expected.on_cpu)
        assert found.share == pytest.approx(expected.share)


def test_a_part_is_not_found_inside_a_longer_name():
    assert parts.gpu("RTX 4090D").memory_gbps == 1008
    assert parts.gpu("RTX 3080 Ti").name == "RTX 3080 Ti"
    assert parts.cpu("Ryzen 9 9950X3D2 (16c)").name == "9950X3D2"
    assert parts.gpu("A1000") is None
    assert parts.shape("DeepSeek-V2-Lite (deepseek2 16B)").name == "deepseek_v2_lite"


def test_the_older_generation_limits_the_link():
    new, old = parts.gpu("RTX 5090"), parts.cpu("Ryzen 9 5950X")
    assert parts.link_gbps(new, old) == parts.LINK_GBPS[4, 16]


def test_threads_saturate_the_memory_and_too_many_get_in_the_way():
    for name in ("Ryzen 9 7950X", "EPYC 9754"):
        host = parts.cpu(name)
        shares = [parts.thread_share(host, n) for n in (1, 4, 8, 16, host.cores, 2 * host.cores)]
        assert shares[:5] == sorted(shares[:5])
        assert shares[4] == 1.0
        assert shares[5] < 1.0


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        ("4x16GB DDR4-3200, quad channel", 102.4),
        ("12ch DDR5-6000 ECC", 576.0),
        ("128GB DDR5-4800 dual channel", 76.8),
        ("32 GiB (type not stated)", None),
    ],
)
def test_memory_by_its_words(text, gbps):
    assert parts.ram_gbps(text, parts.cpu("EPYC 9355")) == (gbps and pytest.approx(gbps))


def test_a_report_is_added_and_stands_beside_its_prediction(tmp_path):
    file, table = tmp_path / "mine.yaml", tmp_path / "reports.csv"
    file.write_text(REPORT)
    line = add(file, table)
    assert line.startswith("mine-1: measured 36.4 tok/s, predicted ")
    file.write_text(REPORT.replace("mine-1", "mine-2").replace("36.4", "1000"))
    assert line.split("predicted")[1].split(",")[0] in add(file, table)
    assert table.read_text().count("\n") == 3
    with pytest.raises(UserError, match="has a row 'mine-2' already"):
        add(file, table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("engine: llama.cpp\n", ""), "'engine' is missing"),
        (("engine:", "engin:"), "key 'engin' is not known; did you mean 'engine'?"),
        (("36.4", "fast"), "tokens_per_second is 'fast', not a number above 0"),
        (("36.4", "0"), "tokens_per_second is 0, not a number above 0"),
        (("engine: llama.cpp", "engine: [a]"), "'engine' is not a text or a number"),
    ],
)
def test_a_report_that_is_wrong_says_what(change, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(REPORT.replace(*change))
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        read_report(file)
