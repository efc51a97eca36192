"""Preparing run directories, with the errors a user gets; text, tokenizers, configurations."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.config.schema import Config, parse_config
from penstock.host.errors import CapacityError, ConfigError
from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.corpus import write_tokens
from penstock.models.data.marks import Marks
from penstock.models.data.reading.records import Document
from penstock.models.data.tokenizer import END_OF_TEXT, ByteTokenizer, open_tokenizer
from penstock.models.prepare import main, prepare
from penstock.models.surgery.hf import resolve_hf_config
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable
from penstock.workers.data import TokenDataset, micro_batches
from tests.encoding import encoded

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
BERT = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "model_type": "bert"
}


def make(tmp_path: Path, *, hf: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A configuration over a text file of 2,000 bytes, unless the data section says otherwise."""
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_bytes(bytes(range(32, 127)) * 21 + b"end")
    data = sections.pop("data", {"path": str(text)})
    return parse_config(
        {
            "model": {"hf": {**LLAMA, **(hf or {})}},
            "data": {"sequence_length": 16, **data, **sections.pop("more_data", {})},
            **sections,
        }
    )


def test_prepared_directory(tmp_path: Path) -> None:
    config = make(tmp_path)
    prepare(config, tmp_path)
    assert json.loads((tmp_path / "model/config.json").read_text())["vocab_size"] == 257
    assert RunDirectory(tmp_path).table.vocab_size == 257
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    assert list(meta) == ["fingerprint", "train"]
    assert {
        k: v for k, v in meta["train"].items() if k not in ("fingerprint", "source", "sums")
    } == {
        "path": "train.bin",
        "first_token": 0,
        "num_tokens": 1999,
        "token_dtype": "uint16",
        "vocab_size": 257,
        "eos": 256,
        "mask": None,
    }
    tokens = np.fromfile(tmp_path / "data/train.bin", dtype="<u2")
    assert tokens[:3].tolist() == [32, 33, 34] and tokens[-4:].tolist() == [101, 110, 100, 256]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [
        "meta.json",
        "train.bin",
        "train.sums",
    ]


def test_unchanged_inputs_are_not_prepared_again(tmp_path: Path) -> None:
    files = [tmp_path / n for n in ("table.json", "model/config.json", "data/train.bin")]
    prepare(make(tmp_path), tmp_path)
    first = [f.stat().st_mtime_ns for f in files]
    prepare(make(tmp_path), tmp_path)
    assert [f.stat().st_mtime_ns for f in files] == first
    prepare(make(tmp_path, train={"freeze": ["norm"]}), tmp_path)
    second = [f.stat().st_mtime_ns for f in files]
    assert second[0] > first[0] and second[2] == first[2]
    files[2].write_bytes(b"cut short")
    prepare(make(tmp_path), tmp_path)
    assert files[2].stat().st_size == 2 * 1999
    (tmp_path / "text.txt").write_bytes(b"other" * 100)
    prepare(make(tmp_path), tmp_path)
    assert files[2].stat().st_size == 2 * 501


def test_a_run_that_has_trained_keeps_the_chunks_of_its_loss(tmp_path: Path) -> None:
    """Tables of older versions have no number, and a table that is made again has none either."""
    path = tmp_path / "table.json"
    prepare(make(tmp_path), tmp_path)
    new = BlockTable.from_json(path.read_text())
    assert new.loss_rows
    old = replace(new, loss_rows=None).to_json()
    path.write_text(old)
    (tmp_path / "journal.sqlite").touch()
    (tmp_path / "model" / "meta.json").write_text("{}")
    prepare(make(tmp_path), tmp_path)
    assert path.read_text() == old


def test_held_out_sequences_are_the_last(tmp_path: Path) -> None:
    config = make(tmp_path, train={"eval_every": 5}, more_data={"eval_fraction": 0.1})
    prepare(config, tmp_path)
    train = TokenDataset.open(tmp_path / "data", "train", config)
    held = TokenDataset.open(tmp_path / "data", "eval", config)
    assert (train.num_sequences, held.num_sequences) == (124 - 12, 12)
    whole = np.fromfile(tmp_path / "data/train.bin", dtype="<u2")
    assert held.batch(0, 2).tolist() == [
        whole[16 * i : 16 * i + 17].tolist() for i in (112, 113)
    ], "evaluation keeps the order of the text"


def test_evaluation_text_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "eval.md").write_text("e" * 40)
    more = {"eval_path": str(tmp_path / "eval.md")}
    config = make(tmp_path, train={"eval_every": 5}, more_data=more)
    prepare(config, tmp_path)
    assert TokenDataset.open(tmp_path / "data", "train", config).num_sequences == 124
    assert TokenDataset.open(tmp_path / "data", "eval", config).batch(0, 1).tolist() == [[101] * 17]


def test_token_files_stay_where_they_are(tmp_path: Path) -> None:
    np.arange(1000, dtype="<u4").tofile(tmp_path / "tokens.bin")
    data = {
        "tokens": str(tmp_path / "tokens.bin"),
        "token_dtype": "uint32",
        "sequence_length": 16,
        "shuffle": False,
    }
    config = make(tmp_path, hf={"vocab_size": 1000}, data=data)
    prepare(config, tmp_path)
    dataset = TokenDataset.open(tmp_path / "data", "train", config)
    assert dataset.batch(1, 1).tolist() == [list(range(16, 33))]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["meta.json", "train.sums"]
    with pytest.raises(
        ConfigError, match=r"holds token 999 at offset 3,996, the model has a vocabulary of 999"
    ):
        prepare(make(tmp_path, hf={"vocab_size": 999}, data=data), tmp_path)
    with pytest.raises(ConfigError, match=r"model.hf.vocab_size: is missing"):
        prepare(make(tmp_path, data=data), tmp_path)


def test_a_masked_token_file_needs_the_number_of_its_mask(tmp_path: Path) -> None:
    np.arange(1000, dtype="<u2").tofile(tmp_path / "own.bin")
    tokens = {"tokens": str(tmp_path / "own.bin"), "sequence_length": 16, "objective": "masked"}

    def made(mask_token: int | None) -> Config:
        data = {**tokens, "mask_token": mask_token}
        return parse_config({"model": {"hf": {**BERT, "vocab_size": 1000}}, "data": data})

    with pytest.raises(ConfigError, match=r"the tokenizer has no mask token; give its number"):
        prepare(made(None), tmp_path)
    with pytest.raises(ConfigError, match=r"data.mask_token = 1000: the model has a vocabulary"):
        prepare(made(1000), tmp_path)
    prepare(made(999), tmp_path)
    dataset = TokenDataset.open(tmp_path / "data", "train", made(999))
    (batch,), counted = micro_batches(dataset, 0, 1, 1)
    assert counted == 2 and (batch.labels != -100).sum() == 2


@pytest.mark.parametrize(
    ("hf", "sections", "complaint"),
    [
        ({"hiden_size": 3}, {}, r"model.hf.hiden_size: unknown key; known keys are hidden_size"),
        ({"model_type": "lama"}, {}, r"model_type = 'lama': .* try llama"),
        (
            {"hidden_size": "x"},
            {},
            r"model.hf: not a llama configuration: Field 'hidden_size' expected int, got str",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {},
            r"model.hf: not a llama configuration: The hidden size \(\d+\) is not a multiple",
        ),
        (
            {"vocab_size": 200},
            {},
            r"vocab_size = 200: tokenizer 'byte' ends documents with id 256; give at least 257",
        ),
        ({}, {"train": {"global_batch": 500}}, r"train.global_batch = 500: .* has 124 sequences"),
        ({}, {"train": {"freeze": ["nothing"]}}, r"train.freeze: 'nothing' matches no parameter"),
        (
            {},
            {"optimizer": {"groups": [{"match": "embd", "rate": 0.1}]}},
            r"optimizer.groups.0.match: 'embd' .* such as model.embed_tokens.weight",
        ),
        (
            {},
            {
                "optimizer": {"groups": [{"match": "embed", "rate": 0.1}]},
                "train": {"freeze": ["embed"]},
            },
            r"groups.0.match: \['embed'\] matches only parameters that are not trained",
        ),
        (
            {},
            {"data": {"path": "/none/*.txt"}},
            r"data.path = '/none/\*.txt': matches no file of text; give",
        ),
        ({}, {"data": {"path": "@stlib"}}, r"unknown source; the only one is @stdlib"),
        ({}, {"data": {"tokens": "/none.bin"}}, r"model.hf.vocab_size: is missing"),
        (
            {"vocab_size": 9},
            {"data": {"tokens": "/none.bin", "sequence_length": 8}},
            r"data.tokens = '/none.bin': no such file",
        ),
        (
            {},
            {"data": {"path": "@stdlib", "tokenizer": "/none.json"}},
            r"data.tokenizer = '/none.json': cannot read it: No such file",
        ),
    ],
)
def test_bad_input_is_named(hf, sections, complaint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        prepare(make(tmp_path, hf=hf, **sections), tmp_path)


def test_process_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resolved.yaml").write_text(make(tmp_path, hf={"x": 1}).to_yaml())
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("penstock: model.hf.x: unknown key")
    (tmp_path / "resolved.yaml").write_text(make(tmp_path).to_yaml())
    assert main([str(tmp_path), "--table-only"]) == 0
    assert not (tmp_path / "data").exists()
    assert main([str(tmp_path)]) == 0


def test_tokens_on_a_full_disk_are_named_with_what_they_need(tmp_path: Path) -> None:
    texts = [Document(place="a text", parts=["x" * 3000])] * 4
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(CapacityError, match=r"out\.bin: no space left .* [\d,]+ bytes"):
            out = tmp_path / "out.bin"
            write_tokens(texts, ByteTokenizer(), out, ChunkHasher(), Marks(), vocab_size=257)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_that_continues_takes_no_torch(tmp_path: Path) -> None:
    prepare(make(tmp_path), tmp_path)
    (tmp_path / "state").mkdir()  # it has started
    program = (
        "import sys; from pathlib import Path\n"
        "from penstock.config.schema import load_config\n"
        "from penstock.models.prepare import prepare\n"
        "import penstock.workers.data\n"
        f"prepare(load_config(Path({str(tmp_path / 'again.yaml')!r})), Path({str(tmp_path)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    (tmp_path / "again.yaml").write_text(make(tmp_path).to_yaml())
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0


def test_special_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    phi = {"model_type": "phi3", "pad_token_id": None}
    config = make(tmp_path, hf=phi)
    resolved = resolve_hf_config(config, tokenizer_vocab_size=257, eos=256)
    assert (resolved.bos_token_id, resolved.eos_token_id, resolved.pad_token_id) == (
        None,
        256,
        None,
    )
    config = make(tmp_path, hf={"eos_token_id": 5, "vocab_size": 300})
    resolved = resolve_hf_config(config, tokenizer_vocab_size=257, eos=256)
    assert (resolved.eos_token_id, resolved.vocab_size) == (5, 300)


def test_byte_tokenizer_equals_its_exported_form() -> None:
    ours = ByteTokenizer()
    exported = Tokenizer.from_str(ours.files()["tokenizer.json"].decode())
    assert exported.token_to_id(END_OF_TEXT) == ours.eos
    for text in ("a b\n\tc", "äöü 中文 😀", "\x00\x7f\x80", "  two  spaces's"):
        assert exported.encode(text).ids == encoded(ours, text)
        assert exported.decode(exported.encode(text).ids) == text


def test_tokenizer_in_a_file_of_its_own(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "to": 1, "be": 2, "[STOP]": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    config = make(tmp_path, more_data={"tokenizer": str(tmp_path / "words.json")})
    with pytest.raises(ConfigError, match=r"has none of the end tokens .*name yours as eos_token"):
        open_tokenizer(config)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[STOP]"}}')
    opened = open_tokenizer(config)
    assert opened is not None
    assert (opened.vocab_size, opened.eos) == (4, 3)
    assert encoded(opened, "to be or to") == [1, 2, 0, 1]
    assert json.loads(opened.files()["tokenizer_config.json"])["eos_token"] == "[STOP]"
    (tmp_path / "words.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer.json"):
        open_tokenizer(config)
