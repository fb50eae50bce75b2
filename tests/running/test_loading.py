"""Checkpoints: what loads, and what is refused before it costs anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast

from oled.errors import UserError
from oled.record import BlockDiffusion, LoadedModel, load_model, plain_prompt, record
from oled.trace.reader import load

from .conftest import COMMON, CONFIGS, build

PROMPTS = [plain_prompt("How many pears?")]


def saved(family: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    build(family).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    return saved("qwen3_moe", tmp_path / "qwen", tokenizer)


def edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_comes_back_from_disk(
    family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load_model(str(saved(family, tmp_path / family, tokenizer)), "cpu").model
    ours, theirs = loaded.state_dict(), build(family).state_dict()
    assert type(loaded) is type(build(family))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_recording_names_the_numbers_types(loaded: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "small-llada"
    loaded.model.half().save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    again = load_model(str(folder), device="cpu")
    assert (again.name, again.stored_dtype) == ("small-llada", torch.float16)
    assert again.model.dtype == torch.float32
    assert load_model(str(folder), "cpu", "bfloat16").model.dtype == torch.bfloat16
    record(again, PROMPTS, BlockDiffusion(block_length=8, max_new_tokens=8), tmp_path / "t")
    model = load(tmp_path / "t").manifest.model
    assert (model["id"], model["dtype"], model["stored_dtype"]) == (
        "small-llada",
        "float32",
        "float16",
    )


def test_a_dense_model_is_refused_before_its_weights(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    LlamaConfig(**COMMON).save_pretrained(tmp_path)  # neither weights nor tokenizer
    with pytest.raises(UserError, match=r"\(llama\) is not a mixture of experts"):
        load_model(str(tmp_path), "cpu")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not to be read")
    with pytest.raises(UserError, match=r"\(llama\) is not a mixture of experts"):
        load_model(str(tmp_path), "cpu")


def test_weights_that_are_not_there_are_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.2.mlp.gate.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"1 weights .* such as model\.layers\.2\.mlp\.gate\.weight"
    ):
        load_model(str(checkpoint), "cpu")


def test_weights_of_another_shape_are_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, vocab_size=300)
    with pytest.raises(UserError, match=r"the shape \(258, 32\), config.json says \(300, 32\)"):
        load_model(str(checkpoint), "cpu")


def test_a_damaged_file_is_said_in_a_line(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="can not be loaded: Error while deserializing") as error:
        load_model(str(checkpoint), "cpu")
    assert "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer_is_refused(checkpoint: Path) -> None:
    for file in checkpoint.glob("token*"):
        file.unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_model(str(checkpoint), "cpu")


def test_another_models_tokenizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load_model(str(checkpoint), "cpu")
    other = load_model("tiny", "cpu").tokenizer
    with pytest.raises(UserError, match="the tokenizer is another model's"):
        record(
            loaded._replace(tokenizer=other),
            PROMPTS,
            BlockDiffusion(block_length=4, mask_id=1),
            tmp_path / "t",
        )
    with pytest.raises(UserError, match=r"decode\.mask_id is 258; the model has 258 tokens"):
        record(loaded, PROMPTS, BlockDiffusion(block_length=4, mask_id=258), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_foreign_code_does_not_run(checkpoint: Path) -> None:
    """For model types of ours it is not even needed."""
    code = {"AutoConfig": "my_code.MyConfig", "AutoModelForCausalLM": "my_code.MyModel"}
    edit_config(checkpoint, model_type="my_moe", auto_map=code)
    (checkpoint / "my_code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match=r"code of its own; model\.trust_remote_code=true"):
        load_model(str(checkpoint), "cpu")
    edit_config(checkpoint, model_type="sdar_moe", mask_token_id=1)
    assert type(load_model(str(checkpoint), "cpu").model).__name__ == "SDARMoeForCausalLM"


def test_revision_and_trust_reach_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def from_pretrained(source: str, **options: object) -> None:
        asked.update(options, source=source)
        raise OSError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    for trust, revision in ((False, None), (True, "v2")):
        with pytest.raises(UserError, match="model=a/b can not be loaded: no network"):
            load_model("a/b", "cpu", trust_remote_code=trust, revision=revision)
        assert asked == {"source": "a/b", "trust_remote_code": trust, "revision": revision}


def test_what_can_not_be_loaded_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can not be loaded") as error:
        load_model(str(tmp_path / "nothing"), "cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="use auto, cpu or cuda"):
        load_model("tiny", "gpu")
    with pytest.raises(UserError, match=r"model\.dtype=fp8 is unknown"):
        load_model("tiny", "cpu", "fp8")
