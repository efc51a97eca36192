"""Recipes of ``docs/RECIPES.md`` as a user runs them, with a small model on CPUs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.folders import save_model
from tests.recipes import recipes

PENSTOCK = Path(sys.executable).with_name("penstock")
SMALL = {
    "cluster.device": "cpu",
    "train.global_batch": "8",
    "train.micro_batch": "2",
    "data.sequence_length": "64",
    "optimizer.threads": "2",
}
"""Keys that make a recipe small enough for a test."""
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A folder with the files that the recipes name."""
    for name in ("Qwen3-0.6B-Base", "Qwen2.5-7B-Instruct"):
        family = name[:5].lower()
        save_model(tmp_path / "models" / name, family.rstrip("."), **SHAPE)
    for name, count in (("chats", 24), ("chats-held-out", 8)):
        chats = [
            [
                {"role": "user", "content": f"Where does river {n} go?"},
                {"role": "assistant", "content": f"River {n} goes to the sea."},
            ]
            for n in range(count)
        ]
        write_lines(tmp_path / f"{name}.jsonl", [{"messages": chat} for chat in chats])
    for name, count in (("pairs", 16), ("pairs-held-out", 8)):
        pairs = [
            {"prompt": f"River {n}?", "chosen": " To the sea.", "rejected": " Up the hill."}
            for n in range(count)
        ]
        write_lines(tmp_path / f"{name}.jsonl", pairs)
    return tmp_path


def follow(title: str, folder: Path) -> list[str]:
    """Runs the commands of a recipe in a folder; returns them."""
    recipe = recipes()[title]
    for name, text in recipe.files.items():
        (folder / name).write_text(text)
    followed = []
    for command in recipe.commands:
        words = shlex.split(command)[1:]
        if words[0] == "train":
            words += [word for key in SMALL.items() for word in ("--set", "=".join(key))]
        elif words[0] in ("estimate", "data"):
            continue  # other tests run these, with models of the pages
        done = subprocess.run(
            [PENSTOCK, *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        followed.append(words[0])
    return followed


def last_step(run: Path) -> dict[str, Any]:
    """The last step's line of a run's metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == "train"][-1]


def test_answers_first_then_pairs(folder: Path) -> None:
    assert follow("SFT, then DPO", folder) == ["train", "export", "train", "export"]
    pairs = last_step(folder / "runs" / "dpo")
    assert pairs["step"] == 4 and pairs["pairs"] == 4
    assert (folder / "dpo-hf" / "model.safetensors").exists()
    template = (folder / "dpo-hf" / "chat_template.jinja").read_text()
    assert template == (folder / "sft-hf" / "chat_template.jinja").read_text()
    assert "<|im_start|>" in template


@pytest.mark.slow
def test_an_adapter_is_trained_and_exported_twice(folder: Path) -> None:
    assert follow("LoRA of 7 B on a 24 GB GPU", folder) == ["train", "export", "export"]
    settings = json.loads((folder / "lora-adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (16, 32)
    assert (folder / "lora-merged" / "model.safetensors").exists()
