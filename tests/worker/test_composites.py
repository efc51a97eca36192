"""Folders of models for pictures and text: the text model is trained by itself, and goes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
)
from transformers.utils.logging import disable_progress_bar

from penstock.models.checkpoints import export
from penstock.models.checkpoints.folder import FolderWeights
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.surgery.hf import load_run_config, read_hf_config, resolve_hf_config
from penstock.protocol.run.rundir import RunDirectory
from tests.worker.folder_parity import compare, configured

TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GEMMA_TEXT = {**TEXT, "sliding_window": 4}
GEMMA_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA_TEXT = {
    **TEXT,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "attention_chunk_size": 16,
}
LLAMA_VISION = {
    **{key: value for key, value in GEMMA_VISION.items() if key != "intermediate_size"},
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
WEIGHTS = "model.safetensors"


def shaken(model: Any) -> Any:
    """Returns the model with weights of which every one matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(torch.randn_like(parameter), alpha=0.05)
    return model


def save_gemma(folder: Path) -> None:
    disable_progress_bar()
    places = {"image_token_index": 60, "boi_token_index": 58, "eoi_token_index": 59}
    hf_config = Gemma3Config(
        text_config=GEMMA_TEXT, vision_config=GEMMA_VISION, mm_tokens_per_image=4, **places
    )
    shaken(Gemma3ForConditionalGeneration(hf_config)).save_pretrained(folder)


def save_llama(folder: Path) -> None:
    disable_progress_bar()
    hf_config = Llama4Config(
        text_config=LLAMA_TEXT, vision_config=LLAMA_VISION, image_token_index=60
    )
    shaken(Llama4ForConditionalGeneration(hf_config)).save_pretrained(folder)


def gemma_text(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the text model of the whole one that transformers loads."""
    whole = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    text = Gemma3ForCausalLM(whole.config.text_config).to(dtype)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    return text


def llama_text(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the text model of the whole one that transformers loads."""
    whole = Llama4ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    text = Llama4ForCausalLM(whole.config.text_config).to(dtype)
    text.load_state_dict(whole.language_model.state_dict())
    return text


@pytest.mark.parametrize(("save", "load"), [(save_gemma, gemma_text), (save_llama, llama_text)])
def test_the_text_model_trains_by_itself(save: Any, load: Any, tmp_path: Path) -> None:
    save(tmp_path / "model")
    compared = compare(tmp_path / "model", tmp_path / "run", load=load)
    assert compared.loss < 1e-6 and compared.gradients < 1e-5 and compared.exported == []


def trained(run_dir: Path, config: Any, state_dir: Path) -> dict[str, torch.Tensor]:
    """Writes a saved state in which every trained number is one greater; returns it by name."""
    table = RunDirectory(run_dir).table
    state_dir.mkdir()
    every: dict[str, torch.Tensor] = {}
    for block, tensors in initial_blocks(
        config, load_run_config(run_dir), table, range(len(table.blocks))
    ):
        later = {name: value + 1 for name, value in tensors.items()}
        save_file(later, state_dir / f"block-{block:04d}.safetensors")
        every |= later
    return every


def text_tensors(whole: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the whole gemma that ``tensors`` of its text model are."""
    names = {
        name: name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name
        for name in tensors
    }
    state = whole.state_dict()
    return {name: state[names[name]] for name in tensors}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_whole_model_has_the_other_parts_as_they_were(sharded: bool, tmp_path: Path) -> None:
    folder, run_dir, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    save_gemma(folder)
    before = Gemma3ForConditionalGeneration.from_pretrained(folder)
    if sharded:
        (folder / WEIGHTS).unlink()
        before.save_pretrained(folder, max_shard_size="40KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    (folder / "preprocessor_config.json").write_text("{}")
    config = configured(folder, run_dir)
    later = trained(run_dir, config, tmp_path / "state")
    assert export.main([str(run_dir), str(tmp_path / "state"), str(out), "--whole"]) == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in folder.iterdir()}
    for path in folder.glob("*.json"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    after, info = Gemma3ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    changed = text_tensors(after, later)
    assert all(torch.equal(changed[name], later[name]) for name in later)
    mine = {id(after.get_parameter(name)) for name in after.state_dict() if "language" in name}
    others = [n for n, p in after.named_parameters() if id(p) not in mine]
    assert len(others) > 20
    for name in others:
        assert torch.equal(after.get_parameter(name), before.get_parameter(name)), name


def test_trained_tensors_have_the_types_of_the_folder(tmp_path: Path) -> None:
    folder, run_dir, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    save_gemma(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file({n: v.bfloat16() for n, v in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    config = configured(folder, run_dir)
    later = trained(run_dir, config, tmp_path / "state")
    assert export.main([str(run_dir), str(tmp_path / "state"), str(out), "--whole"]) == 0
    with safe_open(out / WEIGHTS, framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
    after = Gemma3ForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    changed = text_tensors(after, later)
    assert all(torch.equal(changed[n], v.bfloat16().float()) for n, v in later.items())


def test_other_models_have_no_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disable_progress_bar()
    kept = {**GEMMA_TEXT, "model_type": "gemma3_text"}

    text = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kept))
    text.save_pretrained(tmp_path / "model")
    config = configured(tmp_path / "model", tmp_path / "run")
    trained(tmp_path / "run", config, tmp_path / "state")
    arguments = [str(tmp_path / name) for name in ("run", "state", "out")]
    assert export.main([*arguments, "--whole"]) == 2
    assert "--whole: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_parts_are_counted(tmp_path: Path) -> None:
    folder, lines = tmp_path / "model", []
    save_gemma(folder)
    config = configured(folder, tmp_path / "run")
    hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
    assert read_hf_config(folder).model_type == "gemma3"
    FolderWeights.find(folder, hf_config, lines.append)
    assert lines == [
        "model.path: its text model (gemma3_text) is trained; 34 tensors of other parts are left"
        " out (penstock export --whole puts them back)"
    ]
