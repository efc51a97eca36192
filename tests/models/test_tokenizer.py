"""Tokenizers of model folders: opened as transformers opens them, kept, exported, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.models.checkpoints.carried import read_carried, write_files
from penstock.models.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer
from penstock.models.data.tokenizer_folder import FolderTokenizer
from penstock.models.prepare import prepare
from tests.encoding import encoded
from tests.folders import END, NUM_TOKENS, START, STOP, TEXT, save_model

TINY_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A GPT-2 in a folder, and text to train on beside it."""
    save_model(tmp_path / "model", "gpt2", **TINY_GPT2)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "model"


def from_folder(folder: Path, **data: Any) -> Config:
    """Train the model of a folder on the text beside it."""
    text = {} if "tokens" in data else {"path": str(folder.parent / "text.txt")}
    return parse_config(
        {
            "model": {"path": str(folder)},
            "data": {**text, "sequence_length": 16, **data},
            "train": {"global_batch": 1},
        }
    )


def run_dir(folder: Path) -> Path:
    path = folder.parent / "run"
    path.mkdir(exist_ok=True)
    return path


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def test_a_models_own_tokenizer_is_the_default(folder: Path) -> None:
    config = from_folder(folder)
    prepare(config, run_dir(folder))
    meta = json.loads((run_dir(folder) / "data/meta.json").read_text())["train"]
    tokens = np.fromfile(run_dir(folder) / "data/train.bin", dtype="<u2").tolist()
    theirs = AutoTokenizer.from_pretrained(folder)
    assert tokens == [*theirs(TEXT)["input_ids"], theirs.eos_token_id]
    assert len(tokens) < len(TEXT) / 2, "words, not bytes"
    assert (meta["eos"], meta["vocab_size"]) == (theirs.eos_token_id, 320)


def test_bytes_must_be_asked_for(folder: Path) -> None:
    assert isinstance(open_tokenizer(from_folder(folder, tokenizer="byte")), ByteTokenizer)
    prepare(from_folder(folder, tokenizer="byte"), run_dir(folder))
    tokens = np.fromfile(run_dir(folder) / "data/train.bin", dtype="<u2")
    assert bytes(tokens[:-1].astype(np.uint8)) == TEXT.encode() and tokens[-1] == 256
    carried = read_carried(from_folder(folder, tokenizer="byte"), run_dir(folder))
    assert set(carried) == {"tokenizer.json", "tokenizer_config.json"}


def test_a_token_beyond_the_embedding_that_no_text_has(folder: Path) -> None:
    """As gemma-3-1b is published: its tokenizer has the token of pictures, its embedding no row
    for it. The run has the ids of the tokenizer, the export loads with it.
    """
    save_model(folder, "gpt2", **TINY_GPT2, vocab_size=NUM_TOKENS - 1)
    for tokenizer in (str(folder), str(folder / "tokenizer.json")):
        prepare(from_folder(folder, tokenizer=tokenizer), run_dir(folder))
        tokens = np.fromfile(run_dir(folder) / "data/train.bin", dtype="<u2").tolist()
        theirs = AutoTokenizer.from_pretrained(folder)
        assert max(theirs.get_vocab().values()) == NUM_TOKENS - 1
        assert tokens == [*theirs(TEXT)["input_ids"], theirs.eos_token_id]
    write_files(folder.parent / "out", read_carried(from_folder(folder), run_dir(folder)))
    assert AutoTokenizer.from_pretrained(folder.parent / "out").get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_a_token_beyond_the_embedding_is_named_where_a_text_has_it(folder: Path, name: str) -> None:
    save_model(folder, "gpt2", **TINY_GPT2, vocab_size=NUM_TOKENS - 1)
    text = f"up the hill{STOP} and down"
    path, place = folder.parent / name, str(folder.parent / name)
    if path.suffix == ".jsonl":
        text, place = "\n".join(json.dumps({"text": t}) for t in ("one", text)), f"{place}, line 2"
    path.write_text(text)
    config = from_folder(folder)
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(path)})})
    theirs = AutoTokenizer.from_pretrained(folder)
    number = len(theirs("up the hill")["input_ids"])
    with pytest.raises(ConfigError) as caught:
        prepare(config, run_dir(folder))
    assert str(caught.value).startswith(
        f"{place}: token {number} of the text has id {NUM_TOKENS - 1}, and the model has a"
        f" vocabulary of {NUM_TOKENS - 1}; "
    )


def test_bytes_are_held_against_the_embedding_too(folder: Path) -> None:
    save_model(folder, "gpt2", **TINY_GPT2, vocab_size=256)
    with pytest.raises(ConfigError, match=r"tokenizer 'byte' ends documents with id 256; give"):
        prepare(from_folder(folder, tokenizer="byte"), run_dir(folder))


def test_an_export_carries_the_tokenizer_whole(folder: Path) -> None:
    """Whatever became of the folder in the meantime: same ids, template and settings."""
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    (folder / "added_tokens.json").write_text(json.dumps({START: 300, STOP: 301}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages[0]['content'] }}")
    theirs = AutoTokenizer.from_pretrained(folder)
    kept = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    prepare(from_folder(folder), run_dir(folder))
    shutil.rmtree(folder)
    out = folder.parent / "out"
    write_files(out, read_carried(from_folder(folder), run_dir(folder)))
    found = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    left = {Path("config.json"), Path("model.safetensors")}
    assert found == {name: text for name, text in kept.items() if name not in left}
    assert {"chat_template.jinja", "generation_config.json"} <= {p.name for p in found}
    ours = AutoTokenizer.from_pretrained(out)
    says = [{"role": "user", "content": "Where does the water go?"}]
    for template in (None, "rag"):
        arguments = {"tokenize": False, "chat_template": template}
        assert ours.apply_chat_template(says, **arguments) == theirs.apply_chat_template(
            says, **arguments
        )
    talk = ours.apply_chat_template(says, tokenize=False)
    assert ours(talk)["input_ids"] == theirs(talk)["input_ids"]
    assert {300, 301} <= set(ours(talk)["input_ids"])
    assert (ours.eos_token, ours.pad_token) == (END, STOP)


@pytest.mark.parametrize("in_settings", [False, True])
def test_an_export_has_the_variables_of_the_training_as_defaults(
    folder: Path, in_settings: bool
) -> None:
    """transformers renders the export without variables as the published template with them."""
    text = "{{ mood }} {{ messages[0]['content'] }}"
    (folder / "chat_template.jinja").write_text(text)
    if in_settings:
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": name, "template": f"{text}{name}"} for name in ("default", "rag")]
        settings["chat_template"] = named
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(folder)
    config = from_folder(folder, chat_template_kwargs={"mood": "calm"})
    prepare(config, run_dir(folder))
    out = folder.parent / "out"
    write_files(out, read_carried(config, run_dir(folder)))
    ours = AutoTokenizer.from_pretrained(out)
    says = [{"role": "user", "content": "Where does the water go?"}]
    for template in (None, "rag") if in_settings else (None,):
        arguments = {"tokenize": False, "chat_template": template}
        expected = theirs.apply_chat_template(says, mood="calm", **arguments)
        assert ours.apply_chat_template(says, **arguments) == expected
        assert expected.startswith("calm Where")


def test_names_of_templates_name_no_file_elsewhere(folder: Path) -> None:
    kept = run_dir(folder) / "tokenizer"
    kept.mkdir(parents=True)
    named = [{"name": name, "template": "text"} for name in ("../../out", "rag", 3, "/tmp/a")]
    (kept / "tokenizer_config.json").write_text(json.dumps({"chat_template": [*named, "odd"]}))
    carried = read_carried(from_folder(folder, chat_template_kwargs={"mood": 1}), run_dir(folder))
    assert set(carried) == {"tokenizer_config.json", "additional_chat_templates/rag.jinja"}


def test_a_token_file_is_taken_to_be_of_the_models_own_tokenizer(folder: Path) -> None:
    np.arange(100, dtype="<u2").tofile(folder.parent / "tokens.bin")
    config = from_folder(folder, tokens=str(folder.parent / "tokens.bin"))
    prepare(config, run_dir(folder))
    carried = read_carried(config, run_dir(folder))
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(carried)


def test_vocabulary_and_merges_without_a_tokenizer_json(folder: Path) -> None:
    fast = AutoTokenizer.from_pretrained(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    tokenizer = open_tokenizer(from_folder(folder))
    assert tokenizer is not None and tokenizer.eos == 0
    assert encoded(tokenizer, TEXT) == fast(TEXT)["input_ids"]
    assert set(tokenizer.files()) == {"vocab.json", "merges.txt"}


def test_the_end_token_is_the_tokenizers_or_the_models(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=STOP)
    assert open_tokenizer(from_folder(folder)).eos == 301
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=[300, 301])
    assert open_tokenizer(from_folder(folder)).eos == 300
    edit(folder / "config.json", eos_token_id=None)
    assert open_tokenizer(from_folder(folder)).eos == 0, "known by its name"
    text = (folder / "tokenizer.json").read_text()
    for token in (END, STOP):
        text = text.replace(token, token.upper())
    (folder / "tokenizer.json").write_text(text)
    edit(folder / "tokenizer_config.json", pad_token=None)
    with pytest.raises(ConfigError, match=r"has no end token; name one as eos_token in .*model"):
        open_tokenizer(from_folder(folder))


def test_documents_are_never_cut(folder: Path) -> None:
    """Published files may ask for truncation and padding."""
    whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = whole.encode(TEXT).ids
    whole.enable_truncation(5)
    whole.enable_padding(length=9)
    whole.save(str(folder / "tokenizer.json"))
    whole.save(str(folder / "other.json"))
    for name, kind in (("tokenizer.json", FolderTokenizer), ("other.json", JsonTokenizer)):
        tokenizer = open_tokenizer(from_folder(folder, tokenizer=str(folder / name)))
        assert isinstance(tokenizer, kind)
        assert encoded(tokenizer, TEXT) == ids


def nothing(folder: Path) -> None:
    """Leave a folder without any tokenizer."""
    for path in folder.glob("*token*"):
        path.unlink()


def sentencepiece(folder: Path) -> None:
    nothing(folder)
    (folder / "tokenizer.model").write_bytes(b"\x0a\x05hello")


def own_code(folder: Path) -> None:
    nothing(folder)
    (folder / "own.tiktoken").write_bytes(b"aGk= 0\n")
    settings = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def half(folder: Path) -> None:
    nothing(folder)
    (folder / "vocab.json").write_text('{"a": 0}')


def broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def empty(folder: Path) -> None:
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"].update(vocab={END: 0}, merges=[])
    fields["added_tokens"] = fields["added_tokens"][:1]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (nothing, "the folder has no tokenizer"),
        (sentencepiece, "cannot open its tokenizer"),
        (own_code, "cannot open its tokenizer"),
        (half, "cannot open its tokenizer"),
        (broken, "cannot open its tokenizer"),
        (empty, "its tokenizer has no vocabulary"),
    ],
)
def test_folders_without_a_usable_tokenizer_are_refused(
    folder: Path, damage: Any, complaint: str
) -> None:
    """In one line that names the key which led there and what would do."""
    damage(folder)
    for key, data in (("model.path", {}), ("data.tokenizer", {"tokenizer": f"{folder}/"})):
        where = folder
        if key == "data.tokenizer":
            where = folder.rename(folder.parent / "elsewhere")
            save_model(folder, "gpt2", **TINY_GPT2)
            data = {"tokenizer": str(where)}
        with pytest.raises(ConfigError, match=rf"^{key} = '{where}': .*{complaint}") as caught:
            prepare(from_folder(folder, **data), run_dir(folder))
        assert "set data.tokenizer to a tokenizer.json" in str(caught.value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
