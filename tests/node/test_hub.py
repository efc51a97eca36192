"""Names of the Hub in configurations: fetched, pinned in the run, and made local paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM

from penstock.config.adapter import AdapterConfig
from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing import hub as hub_module
from penstock.daemons.node.preparing.hub import WHOLE, HubFiles, local_folder
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.daemons.node.preparing.tables import table_of
from penstock.host.errors import ConfigError
from tests.folders import save_model
from tests.hub_server import Hub, files_of, serving

TOKEN = "hf_secret"
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a model and a data set, for processes that this test starts in its folder."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "made", "llama", **SIZES)
    rows = [json.dumps({"text": f"water {index} runs down"}) for index in range(40)]
    with serving() as server:
        server.repo("models/org/llama").push(files_of(tmp_path / "made"))
        text = "\n".join(rows).encode()
        server.repo("datasets/org/rows").push({"train.jsonl": text, "test.jsonl": text})
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def config_of(**data: Any) -> Config:
    """A run of the Hub's model, on its data unless other data are given."""
    rows = {"sources": [{"path": "org/rows", "split": "train[:50%]"}]}
    return parse_config(
        {
            "run": {"name": "hub"},
            "model": {"path": "org/llama"},
            "data": {"sequence_length": 16, **(data or rows)},
            "train": {"steps": 2, "global_batch": 2, "micro_batch": 1},
            "cluster": {"device": "cpu"},
        }
    )


def test_run_keeps_its_commit_and_asks_no_more(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []
    run = prepare_run(config_of(), tmp_path / "run", lines.append)
    first = hub.repos["models/org/llama"].revisions["main"]
    data = hub.repos["datasets/org/rows"].revisions["main"]
    assert lines[:2] == [
        f"model.path: org/llama of the Hub, at commit {first}",
        f"data.sources: org/rows of the Hub, at commit {data}",
    ]
    snapshots = tmp_path / "hf" / "hub"
    model = snapshots / "models--org--llama" / "snapshots" / first
    source = run.config.data.sources[0]
    assert run.config.model.path == model
    assert source.path == str(
        snapshots / "datasets--org--rows" / "snapshots" / data / "train.jsonl"
    )
    assert source.split == "[:50%]"
    record = json.loads((run.path / "hub.json").read_text())
    names = [(each["name"], each["commit"], each["split"]) for each in record["fetched"]]
    assert names == [("org/llama", first, None), ("org/rows", data, "train[:50%]")]

    hub.requests.clear()
    moved = files_of(tmp_path / "made") | {"generation_config.json": b"{}"}
    hub.repo("models/org/llama").push(moved)
    again = prepare_run(config_of(), tmp_path / "run", lines.append)
    assert again.config.model.path == model
    assert hub.requests == [], "the record of the run is enough"
    (model / "generation_config.json").unlink()
    assert prepare_run(config_of(), tmp_path / "run").config.model.path == model
    assert "GET /api/models/org/llama" not in hub.requests, "the commit is known"
    assert (model / "generation_config.json").exists()
    for path in [*run.path.rglob("*"), *snapshots.rglob("*")]:
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in "\n".join(lines)


def test_table_needs_the_settings_alone(hub: Hub) -> None:
    table = table_of(config_of())
    assert len(table.blocks) == 4
    assert not [each for each in hub.requests if "safetensors" in each]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_table_has_the_adapter_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    hub.repo("models/org/adapter").push(files_of(tmp_path / "adapter"))
    adapter = AdapterConfig(path=Path("org/adapter"))
    table = table_of(config_of().model_copy(update={"adapter": adapter}))
    assert table.trained_parameters == adapted.get_nb_trainable_parameters()[0]


def test_local_paths_ask_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder wins over a name of the Hub, and no process is started for it."""
    for name, folder in (("llama", tmp_path / "made"), ("rows", tmp_path / "made")):
        (tmp_path / "org").mkdir(exist_ok=True)
        (tmp_path / "org" / name).symlink_to(folder)
    (tmp_path / "text.txt").write_text("Water runs down the hill to the wheel.\n" * 40)
    monkeypatch.setattr(hub_module, "run_tool", None)
    run = prepare_run(config_of(path="text.txt"), tmp_path / "run")
    assert run.config.model.path == tmp_path / "org" / "llama"
    assert not (run.path / "hub.json").exists()
    assert hub.requests == []


def test_offline_leaves_the_sentence_about_the_path(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"org/llama': no such folder; give a local folder"):
        prepare_run(config_of(), tmp_path / "run")
    assert hub.requests == []


def test_refused_run_leaves_no_half_of_a_model(hub: Hub, tmp_path: Path) -> None:
    hub.altered.add("model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors differs from the checksum"):
        prepare_run(config_of(), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    hub.altered.clear()
    assert prepare_run(config_of(), tmp_path / "run").table.num_parameters > 0


def test_option_of_a_command_names_a_repository(hub: Hub, tmp_path: Path) -> None:
    del hub
    lines: list[str] = []
    folder = local_folder("MODEL", Path("org/llama"), WHOLE, lines.append)
    assert (folder / "model.safetensors").is_file()
    assert local_folder("MODEL", tmp_path / "made", WHOLE, lines.append) == tmp_path / "made"
    assert len(lines) == 1
    assert HubFiles(progress=lines.append).local("MODEL", "org/llama/x", WHOLE) is None
