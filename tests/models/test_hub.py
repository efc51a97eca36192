"""Files of the Hub, fetched from a server on loopback, and the choice of files from listings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from penstock.config.hub_names import HubName
from penstock.host.errors import CapacityError, ConfigError
from penstock.models.hub import repository
from penstock.models.hub.fetch import fetch, main
from penstock.models.hub.layouts import check_names, data_files, settings_of, weights_of
from tests.hub_server import Hub, files_of, serving

TOKEN = "hf_secret"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
MODEL = {
    "config.json": json.dumps(LLAMA).encode(),
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "model.safetensors": b"w" * 3000,
    "pytorch_model.bin": b"p" * 3000,
    "pytorch_model.bin.index.json": b"{}",
    "modeling_llama.py": b"raise SystemExit",
    "onnx/config.json": b"{}",
    "README.md": b"# A model",
}
TAKEN = ("config.json", "merges.txt", "model.safetensors", "tokenizer.json")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub for this process, with an empty cache and a token."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        close_session()
        yield server
        close_session()


def ask(name: str, use: str = "model", **fields: Any) -> dict[str, Any]:
    """The answer to a request for ``model.path`` or ``data.path``."""
    key = "data.path" if use == "data" else "model.path"
    request = {"key": key, "use": use, "name": name, "split": None, "commit": None}
    lines: list[str] = []
    return fetch({**request, "imports": False, **fields}, lines.append) | {"lines": lines}


def downloads(hub: Hub) -> set[str]:
    """Names of the files of which the content went out since the last call."""
    names = {
        each.rpartition("/")[2]
        for each in hub.requests
        if each.startswith("GET ") and ("/resolve/" in each or "/store/" in each)
    }
    hub.requests.clear()
    return names


def test_fetches_settings_tokenizer_and_safetensors_alone(hub: Hub) -> None:
    commit = hub.repo("models/org/llama").push(MODEL)
    answer = ask("org/llama")
    folder = Path(answer.pop("folder"))
    files = {name: len(MODEL[name]) for name in TAKEN}
    assert answer == {
        "commit": commit,
        "place": "",
        "split": None,
        "files": files,
        "lines": [],
    }
    assert files_of(folder) == {name: MODEL[name] for name in TAKEN}
    assert downloads(hub) == set(TAKEN)
    assert ask("org/llama")["commit"] == commit
    assert downloads(hub) == set(), "the cache has all files"


def test_no_token_reaches_the_store_of_large_files(hub: Hub) -> None:
    hub.repo("models/org/llama").push(MODEL)
    ask("org/llama")
    assert hub.tokens == {(TOKEN, False)}


def test_a_hub_out_of_reach_names_the_folder_in_the_cache(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("models/org/llama").push(MODEL)
    folder = ask("org/llama")["folder"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError) as caught:
        ask("org/llama")
    assert f"(huggingface_hub's cache has one: {folder})" in str(caught.value)


def test_keeps_to_a_commit_when_the_revision_moves(hub: Hub) -> None:
    repo = hub.repo("models/org/llama")
    first = repo.push(MODEL)
    second = repo.push({**MODEL, "model.safetensors": b"v" * 3000})
    repo.push({**MODEL, "model.safetensors": b"u" * 3000}, "refs/pr/1")
    assert ask("org/llama")["commit"] == second
    pinned = ask("org/llama", commit=first)
    assert pinned["commit"] == first
    assert (Path(pinned["folder"]) / "model.safetensors").read_bytes() == b"w" * 3000
    request = ask("org/llama@refs/pr/1")
    assert (Path(request["folder"]) / "model.safetensors").read_bytes() == b"u" * 3000


def test_takes_shards_of_the_index_and_no_other_weights(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {name: content for name, content in MODEL.items() if name != "model.safetensors"}
    files |= {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"1",
        "model-2.safetensors": b"2",
        "consolidated.safetensors": b"3",
    }
    hub.repo("models/org/llama").push(files)
    assert "consolidated.safetensors" not in ask("org/llama")["files"]
    assert {"model-1.safetensors", "model-2.safetensors"} <= downloads(hub)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_continues_an_interrupted_download(hub: Hub, name: str) -> None:
    hub.repo("models/org/llama").push(MODEL)
    hub.cut.add(name)
    assert files_of(Path(ask("org/llama")["folder"])).keys() == set(TAKEN)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_removes_a_file_that_differs_from_its_checksum(hub: Hub, name: str) -> None:
    hub.repo("models/org/llama").push(MODEL)
    hub.altered.add(name)
    with pytest.raises(ConfigError, match=f"{name} differs from the checksum.*repeat the command"):
        ask("org/llama")
    hub.altered.clear()
    downloads(hub)
    answer = ask("org/llama")
    assert (Path(answer["folder"]) / name).read_bytes() == MODEL[name]
    assert name in downloads(hub)


def test_refuses_types_before_their_weights_are_fetched(hub: Hub) -> None:
    config = {**LLAMA, "model_type": "mine", "auto_map": {"AutoConfig": "modeling.Config"}}
    hub.repo("models/org/mine").push({**MODEL, "config.json": json.dumps(config).encode()})
    with pytest.raises(ConfigError, match=r"= 'mine': transformers knows no such type"):
        ask("org/mine")
    assert "model.safetensors" not in downloads(hub)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("org/none", r"127\.0\.0\.1:\d+ has no model org/none, or it is not open to your token"),
        ("org/llama@v9", r"the model org/llama has no revision 'v9'; see https://.*/tree/main"),
        ("org/pickles", r"has only pickles such as pytorch_model\.bin.*save_pretrained"),
        ("org/data", r"has no config\.json, so it is no model"),
    ],
)
def test_names_what_the_hub_lacks(hub: Hub, name: str, error: str) -> None:
    hub.repo("models/org/llama").push(MODEL)
    without = {key: value for key, value in MODEL.items() if not key.endswith(".safetensors")}
    hub.repo("models/org/pickles").push(without)
    hub.repo("models/org/data").push({"a.txt": b"a"})
    with pytest.raises(ConfigError, match=rf"^model\.path = '{name}': .*{error}") as caught:
        ask(name)
    assert TOKEN not in str(caught.value) and "signature" not in str(caught.value)


def test_names_the_remedy_of_a_gated_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("models/org/llama").push(MODEL)
    hub.repos["models/org/llama"].gated = True
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"gated: accept its conditions at https://.*HF_TOKEN"):
        ask("org/llama")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ask("org/llama")["files"]


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (
            "model",
            r"^model\.path = 'org/x': no such folder; give a local.*hf download org/x",
        ),
        ("data", r"^data\.path = 'org/x': no such file or folder; .*--repo-type dataset"),
    ],
)
def test_offline_says_what_would_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, use: str, error: str
) -> None:
    # The port of the server that `hub` has is in use; nothing listens on port 1.
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:password@127.0.0.1:1")
    with pytest.raises(ConfigError, match=error) as caught:
        ask("org/x", use)
    assert str(caught.value).endswith("127.0.0.1:1 has not answered as the Hub does (ConnectError)")
    assert "password" not in str(caught.value)


def test_refuses_a_disk_that_is_too_small(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("models/org/llama").push(MODEL)
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(repository.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(CapacityError, match=r"to be fetched, and .*hub has 1 bytes free.*HF_HOME"):
        ask("org/llama", "config")


def test_says_bytes_of_bytes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("models/org/llama").push({**MODEL, "model.safetensors": b"w" * (3 << 20)})
    monkeypatch.setattr(repository, "SAY_EVERY_S", 0.0)
    lines = ask("org/llama")["lines"]
    assert lines[0] == "fetching org/llama: 3.0 MiB"
    assert "fetching org/llama: 3.0 MiB of 3.0 MiB" in lines
    assert lines[-1] == "fetched org/llama: 3.0 MiB"


def test_tool_answers_in_its_last_line(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repo("models/org/llama").push(MODEL)
    request = {"key": "MODEL", "use": "config", "name": "org/llama", "split": None, "commit": None}
    assert main([json.dumps(request)]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])["answer"]
    assert answer["files"] == {"config.json": len(MODEL["config.json"])}


def test_fetches_one_split_of_a_data_set(hub: Hub) -> None:
    files = {
        "data/train-00000-of-00002.parquet": b"1",
        "data/train-00001-of-00002.parquet": b"2",
        "data/test-00000-of-00001.parquet": b"3",
        "chats.py": b"raise SystemExit",
    }
    hub.repo("datasets/org/chats").push(files)
    answer = ask("org/chats", "data", split="train[:90%]")
    assert answer["place"] == "data/train-0000*-of-00002.parquet"
    assert (answer["split"], sorted(answer["files"])) == ("[:90%]", sorted(files)[2:])
    assert files_of(Path(answer["folder"])).keys() == set(sorted(files)[2:])


HEADER = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test.jsonl
- config_name: socratic
  data_files:
  - split: train
    path: socratic/*
---
# Chats
"""
SUBSETS = ("main/test.jsonl", "main/train-0.jsonl", "main/train-1.jsonl", "socratic/a.jsonl")


@pytest.mark.parametrize(
    ("text", "names", "readme", "split", "place"),
    [
        ("org/a", ("train.jsonl", "README.md"), "", None, "train.jsonl"),
        ("org/a", ("train.jsonl", "dev.jsonl"), "", "validation", "dev.jsonl"),
        ("org/a", ("a.parquet", "b.parquet", "c.txt"), "", "[10%:]", "*.parquet"),
        ("org/a@main/main", SUBSETS, HEADER, "train", "main/train-*.jsonl"),
        ("org/a@main/main/train-*", SUBSETS, HEADER, None, "main/train-*.jsonl"),
        ("org/a@v1/main/test.jsonl", SUBSETS, HEADER, None, "main/test.jsonl"),
        ("org/a", SUBSETS, HEADER.replace("name: main", "name: default"), "test", SUBSETS[0]),
        ("org/a", ("x/1.csv", "x/2.csv"), "---\nconfigs: 3\n---", None, "x/*.csv"),
        ("org/a", ("a.jsonl", ".hidden.jsonl", "dataset_infos.json"), "---", None, "a.jsonl"),
    ],
)
def test_finds_the_files_of_a_split(
    text: str, names: tuple[str, ...], readme: str, split: str | None, place: str
) -> None:
    name = HubName.parse(text)
    assert name is not None
    assert data_files(name, names, readme, split).place == place


@pytest.mark.parametrize(
    ("names", "readme", "split", "error"),
    [
        (("train.jsonl", "test.jsonl"), "", None, r"several splits, test, train; .*@main/test"),
        (("train.jsonl", "test.jsonl"), "", "dev", r"no split 'dev'; its splits are test, train"),
        (SUBSETS, HEADER, "train", r"several subsets; .*org/a@main/main/train-\* \(main\)"),
        (
            ("m/train.csv", "s/train.csv"),
            "",
            "train",
            r"several folders.*@main/m, org/a@main/s",
        ),
        (("make.py", "README.md"), "", None, r"no code of a data set is run.*refs/convert/parquet"),
        (("a[1].csv", "a[2].csv"), "", None, r"no glob names these files alone"),
    ],
)
def test_lists_the_choices_of_an_unclear_layout(
    names: tuple[str, ...], readme: str, split: str | None, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        data_files(HubName(repository="org/a"), names, readme, split)


def test_refuses_a_folder_that_a_data_set_lacks() -> None:
    name = HubName(repository="org/a", revision="main", inside="none")
    with pytest.raises(ConfigError, match=r"has no data 'none'; folders with data are main, soc"):
        data_files(name, SUBSETS, HEADER, None)


@pytest.mark.parametrize(
    "name", ["../a.json", "/etc/passwd", "a/../b", "a//b", ".", "a\\b", "a\nb"]
)
def test_refuses_names_that_lead_out_of_the_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="the Hub lists a file"):
        check_names(["config.json", name])


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": {"a": "../b.safetensors"}}'])
def test_refuses_a_damaged_index(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"index\.json"):
        weights_of(["a.safetensors"], {}, content)


def test_leaves_weights_and_programs_out_of_settings() -> None:
    names = [*MODEL, "model.safetensors.index.json", "tokenizer.model", "chat_template.jinja"]
    expected = ["chat_template.jinja", "config.json", "merges.txt"]
    assert settings_of(names) == [
        *expected,
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None, None)),
        ("a/b@v1.0", ("a/b", "v1.0", None)),
        ("a/b@refs/pr/3", ("a/b", "refs/pr/3", None)),
        ("a/b@refs/convert/parquet/x", ("a/b", "refs/convert/parquet", "x")),
        ("a/b@main/data/train-*.parquet", ("a/b", "main", "data/train-*.parquet")),
        *((text, None) for text in ("a", "a/b/c", "a/b.json", "/a/b", "../b", "a/..", "a/b--c")),
        *((text, None) for text in ("a/b@", "a/b@main/../c", "a/b@..", "a/b.git", "ä/b", "a/b\n")),
    ],
)
def test_takes_names_of_one_form(text: str, parts: tuple[str | None, ...] | None) -> None:
    name = HubName.parse(text)
    assert (name and (name.repository, name.revision, name.inside)) == parts
    assert name is None or str(name) == text
