"""Folders that say two things about a tensor: what a run takes is what transformers takes."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.config.schema import Config, parse_config
from penstock.host.errors import PenstockError
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import folded
from penstock.models.checkpoints.export import export_hf
from penstock.models.checkpoints.files import recorded_files
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.prepare import main, prepare, review_weights
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType
from tests.folders import save_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = {
    "vocab_size": 302,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
Tensors = dict[str, torch.Tensor]


@dataclass
class Folder:
    """A model folder under construction, the lines that preparing it says, and its run."""

    path: Path
    run_dir: Path
    lines: list[str] = field(default_factory=list)

    def build(self, model_type: str = "llama", seed: int = 0, **fields: Any) -> Tensors:
        """Save a random model there; returns the tensors of its file."""
        self.path.mkdir(exist_ok=True)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2} if model_type == "gpt2" else SIZES
        save_model(self.path, model_type, seed=seed, **{**sizes, **fields})
        return load_file(self.path / SINGLE)

    def save(self, tensors: Tensors, name: str = SINGLE) -> None:
        """Write a file of weights."""
        (self.path / name).parent.mkdir(exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, self.path / name)

    def shard(self, tensors: Tensors, *names: str, index: str = INDEX) -> None:
        """Write shards, and the index that names them."""
        keys = sorted(tensors)
        parts = {name: keys[i :: len(names)] for i, name in enumerate(names)}
        for name, part in parts.items():
            self.save({key: tensors[key] for key in part}, name)
        file_of = {key: name for name, part in parts.items() for key in part}
        text = json.dumps({"metadata": {}, "weight_map": file_of})
        (self.path / index).write_text(text)

    def configure(self, **fields: Any) -> None:
        """Change keys of config.json."""
        path = self.path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    @property
    def config(self) -> Config:
        """A run over the folder."""
        text = self.path.parent / "text.txt"
        text.write_text("Pumps push water up the hill.\n" * 40)
        return parse_config(
            {
                "model": {"path": str(self.path)},
                "data": {"path": str(text), "sequence_length": 16},
            }
        )

    def prepare(self, **options: Any) -> None:
        """Prepare the run."""
        self.run_dir.mkdir(exist_ok=True)
        (self.run_dir / "resolved.yaml").write_text(self.config.to_yaml())
        prepare(self.config, self.run_dir, progress=self.lines.append, **options)

    def initial(self) -> Tensors:
        """The initial weights of the prepared run, under all of their names."""
        table = RunDirectory(self.run_dir).table
        files = recorded_files(self.run_dir, self.path)
        hf_config = load_run_config(self.run_dir)
        blocks = initial_blocks(self.config, hf_config, table, range(len(table.blocks)), files)
        tensors = {name: value for _, block in blocks for name, value in block.items()}
        borrows = [tied for block in table.blocks for tied in block.borrows]
        return tensors | {tied.local_name: tensors[tied.name] for tied in borrows}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "model", tmp_path / "run")


def single_beside_shards(folder: Folder) -> str:
    folder.shard(folder.build(seed=1), "model-1-of-2.safetensors", "model-2-of-2.safetensors")
    folder.build()
    return "model.safetensors is read, .* 3 other files of weights are not: model-1-of-2"


def single_beside_an_index_alone(folder: Folder) -> str:
    single_beside_shards(folder)
    for path in folder.path.glob("model-*"):
        path.unlink()
    return "1 other file of weights is not: model.safetensors.index.json"


def single_beside_other_names(folder: Folder) -> str:
    tensors = folder.build()
    folder.save({k: v + 1 for k, v in tensors.items()}, "z.safetensors")
    folder.save({k: v - 1 for k, v in tensors.items()}, "a.safetensors")
    (folder.path / "pytorch_model.bin").write_bytes(b"old")
    return "3 other files .* are not: a.safetensors, pytorch_model.bin, z.safetensors"


def shards_in_a_folder(folder: Folder) -> str:
    tensors = folder.build()
    (folder.path / SINGLE).unlink()
    folder.shard(tensors, "parts/b.safetensors", "parts/a.safetensors", "c.safetensors")
    folder.save({k: v + 1 for k, v in tensors.items()}, "model-of-others.safetensors")
    return "c.safetensors, parts/a.* are read, .* is not: model-of-others.safetensors"


def shards_that_the_index_maps_wrongly(folder: Folder) -> str:
    tensors = folder.build()
    (folder.path / SINGLE).unlink()
    folder.shard(tensors, "a.safetensors", "b.safetensors")
    index = {
        "metadata": {},
        "weight_map": {"x": "b.safetensors", "lm_head.weight": "a.safetensors"},
    }
    (folder.path / INDEX).write_text(json.dumps(index))
    return ""


def a_file_that_the_configuration_names(folder: Folder) -> str:
    tensors = folder.build()
    folder.save({k: v + 1 for k, v in tensors.items()}, "ema.safetensors")
    folder.configure(transformers_weights="ema.safetensors")
    return "ema.safetensors is read, .* is not: model.safetensors"


def an_index_that_the_configuration_names(folder: Folder) -> str:
    tensors = folder.build()
    moved = {k: v + 1 for k, v in tensors.items()}
    folder.shard(moved, "b.safetensors", "a.safetensors", index="ema.safetensors.index.json")
    folder.configure(transformers_weights="ema.safetensors.index.json")
    return "a.safetensors, b.safetensors are read"


def tied_with_another_head(folder: Folder) -> str:
    tensors = folder.build(tie_word_embeddings=True)
    folder.save(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    return "embed_tokens.weight and lm_head.weight differ .*: tie_word_embeddings is false"


def tied_with_another_head_of_gpt2(folder: Folder) -> str:
    tensors = folder.build("gpt2")
    folder.save(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1})
    return "transformer.wte.weight and lm_head.weight differ"


def tied_with_a_rounded_head(folder: Folder) -> str:
    tensors = folder.build(tie_word_embeddings=True)
    rounded = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    folder.save(tensors | {"lm_head.weight": rounded})
    return "differ in the files"


def tied_with_the_same_head(folder: Folder) -> str:
    tensors = folder.build(tie_word_embeddings=True)
    folder.save(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    return ""


def tied_with_the_same_head_in_another_type(folder: Folder) -> str:
    tensors = folder.build(tie_word_embeddings=True)
    rounded = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    both = {"model.embed_tokens.weight": rounded.float(), "lm_head.weight": rounded}
    folder.save(tensors | both)
    return ""


def tied_with_the_head_alone(folder: Folder) -> str:
    tensors = folder.build(tie_word_embeddings=True)
    folder.save(tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")})
    return ""


def more_layers(folder: Folder) -> str:
    folder.build(num_hidden_layers=4)
    folder.configure(num_hidden_layers=2, layer_types=None)
    return "18 tensors of the files are not used, .*: model.layers.2-3.input_layernorm.weight"


def biases(folder: Folder) -> str:
    folder.build(attention_bias=True)
    folder.configure(attention_bias=False)
    return "8 tensors of the files are not used, .* model.layers.0-1.self_attn.k_proj.bias"


def a_tensor_under_two_names(folder: Folder) -> str:
    tensors = folder.build("gpt2")
    other = {"wte.weight": tensors["transformer.wte.weight"] + 1}
    folder.save(tensors | other)
    return "1 tensor of the files is not used"


SILENT: list[Callable[[Folder], str]] = [
    tied_with_the_same_head,
    tied_with_the_same_head_in_another_type,
    tied_with_the_head_alone,
    shards_that_the_index_maps_wrongly,
]
SPOKEN: list[Callable[[Folder], str]] = [
    single_beside_shards,
    single_beside_an_index_alone,
    single_beside_other_names,
    shards_in_a_folder,
    a_file_that_the_configuration_names,
    an_index_that_the_configuration_names,
    tied_with_another_head,
    tied_with_another_head_of_gpt2,
    tied_with_a_rounded_head,
    more_layers,
    biases,
    a_tensor_under_two_names,
]


@pytest.mark.parametrize("build", [*SPOKEN, *SILENT], ids=lambda build: build.__name__)
def test_a_run_starts_from_what_transformers_loads(
    build: Callable[[Folder], str], folder: Folder
) -> None:
    """Values, ties and all; one line says what is left out."""
    line = build(folder)
    folder.prepare()
    assert [entry for entry in folder.lines if line] == folder.lines
    if line:
        (said,) = folder.lines
        assert said.startswith("model.path: ")
        assert re.search(line, said), said
    reference = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    initial = folder.initial()
    assert initial.keys() == parameters.keys()
    assert all(torch.equal(initial[name], parameters[name]) for name in parameters)
    table = RunDirectory(folder.run_dir).table
    assert any(block.borrows for block in table.blocks) == (
        len(set(map(id, parameters.values()))) < len(parameters)
    )


def test_an_export_of_an_untied_model_says_so(folder: Folder, tmp_path: Path) -> None:
    tied_with_another_head(folder)
    folder.configure(transformers_weights=SINGLE)
    folder.prepare()
    files = RunDirectory(folder.run_dir)
    initial = folder.initial()

    def read_block(block: int) -> dict[str, Any]:
        return {t.name: initial[t.name].numpy() for t in files.table.blocks[block].tensors}

    hf_config, out = load_run_config(folder.run_dir), tmp_path / "out"
    export_hf(hf_config, files.table, read_block, out, dtype=DType.FP32, carried={}, shard_bytes=1)
    fields = json.loads((out / "config.json").read_text())
    assert fields["tie_word_embeddings"] is False and "transformers_weights" not in fields
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, initial["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens.weight, initial["model.embed_tokens.weight"])


def repeated(folder: Folder) -> None:
    tensors = folder.build()
    (folder.path / SINGLE).unlink()
    folder.shard(tensors, "a.safetensors", "b.safetensors")
    name = "model.norm.weight"
    shard = load_file(folder.path / "a.safetensors")
    folder.save(shard | {name: tensors[name] + 1}, "a.safetensors")
    shard = load_file(folder.path / "b.safetensors")
    folder.save(shard | {name: tensors[name]}, "b.safetensors")


def without(*names: str) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        tensors = folder.build()
        folder.save({k: v for k, v in tensors.items() if not k.endswith(names)})

    return build


def prefixed(folder: Folder) -> None:
    folder.save({f"_orig_mod.{k}": v for k, v in folder.build().items()})


def a_pointer(name: str) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.build()
        (folder.path / name).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4120\n"
        )

    return build


def packed(suffix: str) -> Callable[[Folder], None]:
    """Projections as quantizers store them: several numbers in an integer."""

    def build(folder: Folder) -> None:
        tensors = {}
        for name, value in folder.build().items():
            if name.endswith("_proj.weight"):
                stem = name.removesuffix("weight")
                tensors[stem + suffix] = torch.zeros(value.numel() // 8, 1, dtype=torch.int32)
            else:
                tensors[name] = value
        folder.save(tensors)
        folder.configure(quantization_config={"quant_method": "gptq", "bits": 4})

    return build


def padded(token: int) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.build()
        folder.configure(pad_token_id=token)

    return build


def renamed(name: str) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.build()
        (folder.path / SINGLE).rename(folder.path / name)

    return build


def naming(value: Any) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.build()
        folder.configure(transformers_weights=value)

    return build


def another_vocabulary(folder: Folder) -> None:
    tensors = folder.build(tie_word_embeddings=True)
    folder.save(tensors | {"lm_head.weight": torch.zeros(310, 16)})


def a_tie_that_holds_beside_one_that_does_not(folder: Folder) -> None:
    folder.path.mkdir()
    tensors = folder.build("bert", hidden_dropout_prob=0.0, is_decoder=True)
    other = tensors["bert.embeddings.word_embeddings.weight"] + 1
    folder.save(tensors | {"cls.predictions.decoder.weight": other})


def an_index(**fields: Any) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.build()
        (folder.path / SINGLE).unlink()
        (folder.path / INDEX).write_text(json.dumps(fields))

    return build


def a_dangling_link(folder: Folder) -> None:
    folder.build()
    (folder.path / SINGLE).unlink()
    (folder.path / SINGLE).symlink_to("blobs/1234")


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (repeated, r"a.safetensors and b.safetensors both have model.norm.weight, with different"),
        (without("lm_head.weight"), r"the files have no tensor lm_head.weight \(head\)$"),
        (
            without("q_proj.weight", "model.norm.weight"),
            r"lack 3 tensors of the model: model.layers.0-1.self_attn.q_proj.weight, model.norm",
        ),
        (
            prefixed,
            r"names of tensors begin with '_orig_mod.', which torch.compile adds: save the state",
        ),
        (a_pointer(SINGLE), r"model.path = .*: model.safetensors: Git LFS pointers"),
        (a_pointer("config.json"), r"model.path = .*: config.json: Git LFS pointers"),
        (a_pointer("tokenizer.json"), r"model.path = .*: tokenizer.json: Git LFS pointers"),
        (packed("qweight"), r"files are quantized \(quantization_config of config.json: gptq\)"),
        (packed("weight"), r"files are quantized \(quantization_config of config.json: gptq\)"),
        (padded(4096), r"pad_token_id = 4096 .* the model has no such row; vocab_size is"),
        (lambda folder: None, r"model.path = .*: no such folder; give a local folder"),
        (renamed("pytorch_model.bin"), r"and pytorch_model.bin is not read; load .* and save it"),
        (renamed("weights.safetensors"), r"and weights.safetensors is not read; rename it to"),
        (renamed("model.fp16.safetensors"), r"and model.fp16.safetensors is not read; rename it"),
        (renamed("shard-00000-model-00001-of-00001.safetensors"), r"a distributed checkpoint"),
        (a_dangling_link, r"model.safetensors is a link that leads to no file"),
        (naming("gone.safetensors"), r"transformers_weights of .* there is no such file"),
        (naming("../x.safetensors"), r"transformers_weights of .* leads out of the folder"),
        (naming("pytorch_model.bin"), r"transformers_weights of .* give the name of a"),
        (naming(7), r"transformers_weights of .* = 7: give the name of a"),
        (another_vocabulary, r"lm_head.weight has shape \(310, 16\) in the files"),
        (
            a_tie_that_holds_beside_one_that_does_not,
            r"word_embeddings.weight and cls.predictions.decoder.weight, .* differ in the files and"
            r" .* do not; set tie_word_embeddings to false",
        ),
        (an_index(weight_map={"a": "gone.safetensors"}), r"names gone.safetensors, which is miss"),
        (an_index(weight_map={"a": "part.bin"}), r"names part.bin, which is no .safetensors"),
        (an_index(weight_map={}), r"names no files"),
        (an_index(), r"not an index of safetensors files"),
    ],
)
def test_other_folders_are_refused(
    build: Callable[[Folder], None], complaint: str, folder: Folder
) -> None:
    build(folder)
    with pytest.raises(PenstockError, match=complaint) as caught:
        folder.prepare()
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"), [(make_fifo, "FIFO"), (make_socket, "socket"), (Path.mkdir, "folder")]
)
@pytest.mark.parametrize(
    "name",
    [SINGLE, INDEX, "part.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"],
)
def test_what_is_no_file_is_not_waited_for(
    name: str, make: Callable[[Path], None], kind: str, folder: Folder, monkeypatch: Any
) -> None:
    folder.build()
    if name in (INDEX, "part.safetensors"):
        (folder.path / SINGLE).unlink()
        index = {"metadata": {}, "weight_map": {"a": "part.safetensors"}}
        (folder.path / INDEX).write_text(json.dumps(index))
    (folder.path / name).unlink(missing_ok=True)
    monkeypatch.chdir(folder.path)  # the path of a socket is short
    make(Path(name))
    with pytest.raises(PenstockError, match=rf"{name}: is a {kind}|names {name}"):
        folder.prepare()


WIDTHS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_named_when_they_are_read(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    tensor[1, 2] = value
    save_file({"w": tensor, "ok": torch.ones(2)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path, [SINGLE])
    assert torch.equal(checkpoint.read("ok", DType.BF16), torch.ones(2))
    complaint = rf"{SINGLE}: w has 1 number that is not finite \({value} at \[1, 2\]\);"
    with pytest.raises(PenstockError, match=complaint):
        checkpoint.read("w", DType.BF16)


@pytest.mark.parametrize(
    ("value", "dtype", "kept"),
    [
        (65504.0, DType.FP16, True),
        (65519.0, DType.FP16, True),
        (65520.0, DType.FP16, False),
        (-1e5, DType.FP16, False),
        (3.38e38, DType.BF16, True),
        (3.4e38, DType.BF16, False),
        (3.4e38, DType.FP32, True),
        (1e39, DType.FP32, False),
    ],
)
def test_numbers_that_overflow_the_type_of_the_run_are_named(
    value: float, dtype: DType, kept: bool, tmp_path: Path
) -> None:
    save_file({"w": torch.tensor([0.0, value, 1.0], dtype=torch.float64)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path, [SINGLE])
    if kept:
        assert checkpoint.read("w", dtype)[1] == torch.tensor(value)
        return
    with pytest.raises(PenstockError, match=rf"1 number that {dtype} cannot hold \(.* at \[1\]\)"):
        checkpoint.read("w", dtype)


def as_prepared_before(folder: Folder) -> None:
    """Prepare a run as versions did that kept no record of the files."""
    folder.prepare()
    folder.lines.clear()
    path = folder.run_dir / "model" / "meta.json"
    fields = json.loads(path.read_text())
    del fields["weight_files"]
    path.write_text(json.dumps(fields))


def test_a_run_without_a_record_keeps_its_files(folder: Folder) -> None:
    tensors = folder.build(seed=1)
    (folder.path / SINGLE).unlink()
    folder.shard(tensors, "a.safetensors", "b.safetensors")
    as_prepared_before(folder)
    folder.save({k: v + 1 for k, v in tensors.items()})
    review_weights(folder.config, folder.run_dir, folder.lines.append)
    (line,) = folder.lines
    assert line.startswith("model.path: this run keeps to a.safetensors, b.safetensors; a new one")
    assert torch.equal(folder.initial()["lm_head.weight"], tensors["lm_head.weight"])
    folder.lines.clear()
    review_weights(folder.config, folder.run_dir, folder.lines.append)
    assert folder.lines == []


def test_a_run_without_a_record_keeps_its_ties(folder: Folder) -> None:
    """Also where it is prepared again, as for another version of transformers."""
    tensors = folder.build(tie_word_embeddings=True)
    as_prepared_before(folder)
    table = RunDirectory(folder.run_dir).table.to_json()
    folder.save(tensors | {"lm_head.weight": torch.zeros(302, 16)})
    assert main([str(folder.run_dir), "--review"]) == 0
    (folder.run_dir / "journal.sqlite").touch()
    meta = folder.run_dir / "model" / "meta.json"
    meta.write_text(json.dumps({"fingerprint": "of other versions"}))
    folder.prepare()
    assert "keeps model.embed_tokens.weight and lm_head.weight tied" in folder.lines[0]
    assert RunDirectory(folder.run_dir).table.to_json() == table
    embedding = folder.initial()["lm_head.weight"]
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])


def test_a_run_without_a_record_needs_no_folder_to_go_on(folder: Folder) -> None:
    folder.build()
    as_prepared_before(folder)
    folder.path.rename(folder.path.with_name("gone"))
    review_weights(folder.config, folder.run_dir, folder.lines.append)
    assert folder.lines == []


def test_names_are_folded() -> None:
    names = ["a.0.x", "a.1.x", "a.3.x", "a.2.y", "w", "b.1.2.z", "b.2.2.z", "q8.w"]
    assert folded(names) == ["a.0-1,3.x", "a.2.y", "w", "b.1-2.2.z", "q8.w"]
