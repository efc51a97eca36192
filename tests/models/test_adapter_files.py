"""PEFT's files in and out, and merged exports. PEFT is the reference."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, PenstockError, StateError
from penstock.models.adapters.files import SETTINGS, WEIGHTS, read_settings
from penstock.models.checkpoints import export
from penstock.models.checkpoints.adapters import PREFIX
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.inference.loading import ModelPlace, load_model
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType
from tests.folders import save_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

IDS = torch.arange(2 * 12).reshape(2, 12) * 7 % 61
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 320},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
}
TIED = LLAMA | {"tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
GEMMA = TIED | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 16}
MAMBA = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
OPT = {
    **{"model_type": "opt", "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
}
ALL = "all-linear"
PROJECTIONS = ["in_proj", "x_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {"target_modules": ALL, "r": 4, "lora_alpha": 12}),
    "patterns": (
        LLAMA,
        {
            **{"target_modules": r".*\.(q|v|down)_proj", "r": 4, "use_rslora": True},
            **{"rank_pattern": {"q_proj": 6, r"layers\.1\.mlp\.down_proj": 2}},
            "alpha_pattern": {"v_proj": 5},
        },
    ),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "r": 3}),
    "saved": (
        LLAMA,
        {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "saved-without-parameters": (
        LLAMA | {"model_type": "olmo"},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "layers": (LLAMA, {"target_modules": ["k_proj", "mlp.up_proj"], "layers_to_transform": [1]}),
    "excluded": (LLAMA, {"target_modules": ALL, "exclude_modules": ["mlp.gate_proj", "k_proj"]}),
    "qwen2": (TIED | {"model_type": "qwen2"}, {"target_modules": ALL, "r": 2}),
    "gpt2": (GPT2, {"target_modules": ALL, "r": 4}),
    "gpt2-positions": (GPT2, {"target_modules": ["wpe", "c_attn"], "fan_in_fan_out": True}),
    "gemma2": (GEMMA, {"target_modules": ALL, "r": 4}),
    "mamba": (MAMBA, {"target_modules": PROJECTIONS, "r": 4}),
    "opt": (OPT, {"target_modules": ["q_proj", "fc1", "fc2"], "r": 4}),
}


@dataclass(frozen=True)
class Adapted:
    """Folders of a model and of an adapter of PEFT, and the prepared run that starts with both."""

    base: Path
    adapter: Path
    run_dir: Path
    config: Config

    @property
    def state(self) -> Path:
        """A saved state of the first tensors, in the form that memoryd writes."""
        state = self.run_dir / "state"
        if state.exists():
            return state
        state.mkdir()
        table, hf_config = RunDirectory(self.run_dir).table, load_run_config(self.run_dir)
        every = range(len(table.blocks))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[table.weight_dtype]
        for block, tensors in initial_blocks(self.config, hf_config, table, every):
            specs = table.blocks[block].tensors
            saved = {s.name: tensors[s.name] for s in specs if s.trainable}
            saved |= {
                f"frozen.{s.name}": tensors[s.name].to(dtype) for s in specs if not s.trainable
            }
            save_file(saved, state / f"block-{block:04d}.safetensors")
        return state

    def model(self, folder: Path | None, dtype: torch.dtype = torch.float32) -> Any:
        """transformers' model with PEFT's adapter of a folder; None: without one."""
        base = AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)
        return base if folder is None else PeftModel.from_pretrained(base, folder)

    def export(self, out: Path, *options: str) -> Path:
        """What ``penstock export`` runs."""
        words = [str(self.run_dir), str(self.state), str(out), "--verify", *options]
        assert export.main(words) == 0
        return out


def adapted(root: Path, fields: dict[str, Any], settings: dict[str, Any], **model: Any) -> Adapted:
    """A model, an adapter that PEFT has made, with random numbers, and a run of both."""
    base, adapter, run_dir = root / "base", root / "adapter", root / "run"
    save_model(base, **fields)
    made = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **settings)
    )
    torch.manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(adapter)
    return prepared(base, adapter, run_dir, **model)


def prepared(base: Path, adapter: Path, run_dir: Path, **model: Any) -> Adapted:
    """The run's directory after its preparation."""
    run_dir.mkdir()
    config = parse_config(
        {
            "run": {"name": "adapted", "dir": str(run_dir)},
            "model": {"path": str(base), **model},
            "adapter": {"path": str(adapter)},
            "data": {"path": "@stdlib", "sequence_length": 16},
        }
    )
    (run_dir / "resolved.yaml").write_text(config.to_yaml())
    prepare(config, run_dir, table_only=True)
    return Adapted(base=base, adapter=adapter, run_dir=run_dir, config=config)


@pytest.fixture(autouse=True)
def without_a_thread_of_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT merges behind a bar that is off, and that starts the thread of bars even so."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS).logits
    return result


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out:UserWarning")
@pytest.mark.parametrize(("fields", "settings"), CASES.values(), ids=CASES)
def test_files_of_peft_come_back_and_merge_as_by_peft(
    fields: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    run = adapted(tmp_path, fields, settings)
    back = run.export(tmp_path / "back", "--format", "peft")
    theirs, ours = load_file(run.adapter / WEIGHTS), load_file(back / WEIGHTS)
    copies = {name for name in theirs if ".base_layer." in name}
    assert theirs.keys() - copies == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert torch.equal(logits(run.model(back)), logits(run.model(run.adapter)))
    whole = AutoModelForCausalLM.from_pretrained(run.export(tmp_path / "merged")).state_dict()
    expected = run.model(run.adapter).merge_and_unload().state_dict()
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(whole[name], value), name


def in_memory(name: str) -> str:
    """The name of an adapter's tensor in a model in memory; PEFT loads these names, too."""
    if name.endswith(("lora_A.weight", "lora_B.weight")):
        return name.removesuffix("weight") + "default.weight"
    return name + ".default" if "lora_embedding_" in name else name


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning")
def test_names_with_the_name_of_the_adapter_are_read(tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    run = adapted(tmp_path / "a", LLAMA, {**settings, "r": 2})
    theirs = load_file(run.adapter / WEIGHTS)
    named = tmp_path / "named"
    shutil.copytree(run.adapter, named)
    renamed = {in_memory(name): tensor for name, tensor in theirs.items()}
    save_file(renamed, named / WEIGHTS, metadata={"format": "pt"})
    assert sum(".default" in name for name in renamed) == len(theirs) - 2
    (tmp_path / "b").mkdir()
    other = prepared(run.base, named, tmp_path / "b" / "run")
    back = other.export(tmp_path / "back", "--format", "peft")
    ours = load_file(back / WEIGHTS)
    assert ours.keys() == {name for name in theirs if ".base_layer." not in name}
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert torch.equal(logits(other.model(back)), logits(run.model(named)))
    # PEFT refuses this name, of which the meaning is clear all the same.
    head = PREFIX + "lm_head."
    renamed[f"{head}modules_to_save.default.weight"] = renamed.pop(f"{head}weight")
    save_file(renamed, named / WEIGHTS, metadata={"format": "pt"})
    third = prepared(run.base, named, tmp_path / "b" / "third")
    again = load_file(third.export(tmp_path / "again", "--format", "peft") / WEIGHTS)
    assert all(torch.equal(theirs[name], again[name]) for name in ours)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning")
def test_a_tied_embedding_with_an_adapter_is_untied(tmp_path: Path) -> None:
    """PEFT changes the head, too, when it merges; the export computes as the trained model."""
    run = adapted(tmp_path, TIED, {"target_modules": ["embed_tokens"], "r": 3})
    out = run.export(tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings is False
    trained = run.model(run.adapter)
    torch.testing.assert_close(logits(model), logits(trained), rtol=1e-5, atol=1e-6)
    changed = logits(trained.merge_and_unload())
    assert (changed - logits(model)).abs().max() > 0.1


def test_a_base_in_bf16_is_rounded_once(tmp_path: Path) -> None:
    run = adapted(tmp_path, LLAMA, {"target_modules": ALL, "r": 4}, dtype="bf16")
    base = run.model(None, torch.bfloat16).state_dict()
    expected = run.model(run.adapter, torch.bfloat16).merge_and_unload().state_dict()
    whole = AutoModelForCausalLM.from_pretrained(run.export(tmp_path / "merged")).state_dict()
    assert whole.keys() == expected.keys() and any(".q_proj." in name for name in whole)
    for name, value in expected.items():
        assert whole[name].dtype is torch.bfloat16
        assert torch.equal(whole[name], value), name
        assert torch.equal(base[name], value) is not ("_proj." in name), name
    wide = load_file(run.export(tmp_path / "wide", "--dtype", "fp32") / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(wide[name].to(torch.bfloat16), whole[name])
    assert not torch.equal(wide[name], whole[name].float())


def test_generation_has_the_adapter(tmp_path: Path) -> None:
    run = adapted(tmp_path, LLAMA, CASES["patterns"][1])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place = ModelPlace(config=run.config, folder=run.run_dir, state=run.state)
    model = load_model(place, scratch)
    merged = run.model(run.adapter).merge_and_unload()
    assert torch.equal(logits(model), logits(merged))
    assert (logits(model) - logits(run.model(None))).abs().max() > 0.1


def test_a_changed_file_fails_the_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of one tensor, in each format."""
    run = adapted(tmp_path, LLAMA, {"target_modules": ["q_proj"], "r": 2})
    write = export.save_file

    def damaged(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        name = next(name for name in tensors if "layers.1" in name)
        changed = tensors[name].clone()
        changed.view(torch.int32)[0, 0] ^= 1
        write(tensors | {name: changed}, path, metadata=metadata)

    monkeypatch.setattr(export, "save_file", damaged)
    for form in ("hf", "peft"):
        out = tmp_path / form
        words = [str(run.run_dir), str(run.state), str(out), "--format", form]
        assert export.main([*words, "--verify"]) != 0
        assert "layers.1" in capsys.readouterr().err and not out.exists()
        assert export.main(words) == 0, "without --verify the file is as it was written"


def changed_settings(**fields: Any) -> Any:
    """Writes keys into adapter_config.json."""

    def change(folder: Path) -> None:
        path = folder / SETTINGS
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def changed_tensors(change: Any) -> Any:
    """Rewrites adapter_model.safetensors."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors, next(name for name in tensors if "layers.1" in name))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


REFUSED: dict[str, tuple[Any, str]] = {
    "pickle": (pickled, r"adapter_model\.bin, a pickle.*save_pretrained"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"has no adapter_model\.safetensors"),
    "no settings": (lambda f: (f / SETTINGS).unlink(), r"has no adapter_config\.json"),
    "damaged": (lambda f: (f / SETTINGS).write_text("{"), "not a configuration of PEFT"),
    "a list": (lambda f: (f / SETTINGS).write_text("[]"), "not a configuration of PEFT"),
    "type": (changed_settings(peft_type="LOHA"), "peft_type = 'LOHA': only LORA"),
    "task": (changed_settings(task_type="SEQ_CLS"), "task_type = 'SEQ_CLS'"),
    "bias": (changed_settings(bias="all"), "bias = 'all'"),
    "experts": (changed_settings(target_parameters=["w1"]), r"target_parameters = \['w1'\]"),
    "tokens": (changed_settings(trainable_token_indices=[3]), "trainable_token_indices"),
    "dora": (changed_settings(use_dora=True), "use_dora = True: DoRA"),
    "replicated": (changed_settings(layer_replication=[[0, 2]]), "layer_replication"),
    "kasa": (changed_settings(kasa_config={"beta": 1}), "kasa_config"),
    "newer": (changed_settings(use_nova=True), "use_nova = True: this kind of LoRA"),
    "pissa": (changed_settings(init_lora_weights="pissa_niter_4"), "changed the model's own"),
    "olora": (changed_settings(init_lora_weights="olora"), "changed the model's own"),
    "mica": (changed_settings(init_lora_weights="mica"), "init_lora_weights = 'mica'"),
    "rank": (changed_settings(r=0), "r = 0: Input should be greater"),
    "other rank": (changed_settings(r=3), r"has shape \(2, 16\).*ask for \(3, 16\)"),
    "text": (changed_settings(rank_pattern="q"), "rank_pattern = 'q'"),
    "no targets": (changed_settings(target_modules=None), "target_modules is missing"),
    "other model": (changed_settings(target_modules=["c_attn"]), "belongs to another model"),
    "a layer less": (changed_settings(layers_to_transform=[0]), "has 2 tensors that the run has"),
    "bad layers": (changed_settings(layers_to_transform=["0"]), "expected numbers of layers"),
    "more targets": (changed_settings(target_modules=["q_proj", "k_proj"]), "lacks 4 of the"),
    "missing": (changed_tensors(lambda tensors, name: tensors.pop(name)), "lacks 1 of the"),
    "other name": (
        changed_tensors(lambda t, name: t.update({name.replace("_A.", "_A.mine."): t.pop(name)})),
        r"lacks 1 of the.*Names in the file: .*lora_A",
    ),
    "two names": (
        changed_tensors(lambda t, name: t.update({in_memory(name): t[name].clone()})),
        "are one tensor; keep one",
    ),
    "extra": (
        changed_tensors(lambda tensors, name: tensors.update({"a.b": torch.zeros(2)})),
        "has 1 tensors that the run has no place for: a.b",
    ),
    "shape": (
        changed_tensors(lambda t, name: t.update({name: t[name].T.contiguous()})),
        "has shape",
    ),
    "NaN": (
        changed_tensors(lambda t, name: t[name][0].fill_(float("nan"))),
        "16 numbers that are not finite",
    ),
    "integers": (changed_tensors(lambda t, name: t.update({name: t[name].int()})), "is I32"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """An adapter of two modules."""
    root = tmp_path_factory.mktemp("small")
    with warnings.catch_warnings(action="ignore"):
        return adapted(root, LLAMA, {"target_modules": ["q_proj"], "r": 2})


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_files_that_mean_something_else_are_refused(
    change: Any, words: str, small: Adapted, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for path in small.adapter.glob("adapter_*"):
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder)
    with pytest.raises((ConfigError, StateError), match=words) as refusal:
        prepared(small.base, folder, tmp_path / "run")
    assert str(folder) in str(refusal.value)


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning")
def test_an_adapter_of_another_embedding_is_refused(tmp_path: Path) -> None:
    """PEFT saves the weight of an adapted embedding, too."""
    run = adapted(tmp_path, LLAMA, {"target_modules": ["embed_tokens"], "r": 3})
    save_model(tmp_path / "other", **LLAMA, seed=1)
    with pytest.raises(ConfigError, match=r"embed_tokens\.base_layer\.weight is not the weight"):
        prepared(tmp_path / "other", run.adapter, tmp_path / "again")


def test_a_run_that_has_started_keeps_the_settings_of_its_adapter(small: Adapted) -> None:
    """The folder may be gone, or have changed, by then."""
    kept = json.loads((small.run_dir / "model" / "adapter.json").read_text())
    assert kept["targets"] == [f"model.layers.{n}.self_attn.q_proj" for n in range(2)]
    assert (kept["r"], kept["alpha"]) == (2, 8.0) and "dropout" not in kept
    with pytest.raises(PenstockError, match="is no folder"):
        read_settings(small.run_dir / "nothing", [], 0.0)


def test_the_settings_of_layers_are_those_of_peft(tmp_path: Path) -> None:
    """layers_to_transform counts the first number of a name, also below lists of experts."""
    names = [f"model.layers.{a}.experts.{b}.w1" for a in (0, 1, 11) for b in (0, 1)]
    for fields in (
        {"layers_to_transform": 1},
        {"layers_to_transform": [0, 11]},
        {"layers_to_transform": [1], "layers_pattern": "experts"},
        {"layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    ):
        settings = LoraConfig(target_modules=["w1"], r=2, **fields)
        settings.save_pretrained(tmp_path)
        (tmp_path / WEIGHTS).touch()
        expected = [name for name in names if check_target_module_exists(settings, name)]
        assert 0 < len(expected) < len(names)
        assert list(read_settings(tmp_path, names, 0.0).targets) == expected


def test_half_precision_that_cannot_hold_a_weight_is_refused(
    small: Adapted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for path in small.state.iterdir():
        tensors = load_file(path)
        tensors = {n: t * 1e6 if n.endswith("lora_B.weight") else t for n, t in tensors.items()}
        save_file(tensors, state / path.name)
    words = [str(small.run_dir), str(state), str(tmp_path / "out"), "--dtype", DType.FP16]
    assert export.main(words) != 0
    assert "--dtype fp16: model.layers.0.self_attn.q_proj.weight" in capsys.readouterr().err
