"""`oled field predict` and `oled field add` as people type them."""

from __future__ import annotations

import pandas as pd
import pytest

TABLE = """\
id,group,software,model,quant,gpu,gpu_mem_gb,pcie,cpu,ram,ram_gbps_stated,threads,\
bytes_per_expert_weight,experts_on_gpu,experts_elsewhere,context,batch,decode_tps
a,mine,llama.cpp,gpt-oss-120b,MXFP4,RTX 5090,32,,Ryzen 9 9950X,2x48GB DDR5-5600,,,,\
--n-cpu-moe 24 of 36,cpu,0,1,35
b,mine,llama.cpp,gpt-oss-120b,MXFP4,RTX 5090,32,,Ryzen 9 9950X,2x48GB DDR5-5600,,,,\
--n-cpu-moe 36 of 36,cpu,0,1,25
c,mine,llama.cpp,gpt-oss-120b,MXFP4,RTX 5090,32,,Ryzen 9 9950X,2x48GB DDR5-5600,,,,\
some of them,cpu,0,1,25
"""


def test_predict_writes_a_row_each_and_prints_a_summary(oled, tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    done = oled("field", "predict", "table.csv", "out=made", torch=False)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 rows predicted" in done.stdout
    assert "'some of them' does not say which experts are on the GPU" in done.stdout
    found = pd.read_csv(tmp_path / "made" / "predictions.csv")
    assert found["predicted"].isna().tolist() == [False, False, True]
    assert found["predicted"][0] > found["predicted"][1]
    assert found["unit"].unique() == ["tok/s"]


def test_a_probed_host_becomes_hardware(oled, tmp_path):
    words = ["gpu=RTX 5090", "cpu=Ryzen 9 9950X", "link=53", "read=62.3", "both=80"]
    done = oled("field", "host", *words, "out=host.yaml", torch=False)
    assert done.returncode == 0, done.stderr
    from oled.hardware.profile import load_profile

    found = load_profile(tmp_path / "host.yaml")
    assert (found.h2d_pinned.value, found.cpu_stream.value) == (53, 62.3)
    assert found.dram_share.value * found.cpu_stream.value == pytest.approx(80)
    assert found.gpu_mem.value == pytest.approx(1792)
    for low, value, high in ((q.low, q.value, q.high) for q in found.quantities().values()):
        assert low <= value <= high


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["host", "gpu=RTX 5090", "out=h.yaml"], 1, "name the CPU (cpu=…), or say what it reads"),
        (["host", "gpu=RTX 509", "read=60", "out=h.yaml"], 1, "did you mean 'RTX 5090'?"),
        (["host", "gpu=RTX 5090", "read=-1", "out=h.yaml"], 1, "a rate in GB/s is above 0"),
        (["host", "gpu=RTX 5090", "read=x", "out=h.yaml"], 2, "read=x: it is a number, GB/s"),
        (["host", "read=60", "out=h.yaml"], 2, "gpu=NAME and out=FILE.yaml must be given"),
        (["predict", "none.csv", "out=made"], 1, "none.csv: there is no such file"),
        (["predict", "table.csv"], 2, "out=DIR must be given"),
        (["predict", "table.csv", "ot=made"], 2, "there is no key 'ot'; did you mean 'out'?"),
        (["predict", "out=made"], 2, "oled field predict TABLE.csv: name one file"),
        (["predct"], 2, "did you mean 'predict'?"),
        (["add", "none.yaml"], 1, "none.yaml"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(oled, tmp_path, words, code, message):
    (tmp_path / "table.csv").write_text(TABLE)
    done = oled("field", *words, torch=False)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
