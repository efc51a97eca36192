"""Checks before torch is imported: each bad input has its sentence, in a process without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.models.surgery.types import SUPPORTED

BLOCKED = """
import sys
sys.modules["torch"] = None  # an import of torch would fail
from penstock.models.inference.early import main
sys.exit(main(sys.argv[1:]))
"""
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


def checked(run_dir: Path, **sections: Any) -> tuple[int, str]:
    """Exit code and stderr of the checks."""
    fields = {"model": {"hf": LLAMA}, "train": {"steps": 1}, **sections}
    (run_dir / "resolved.yaml").write_text(yaml.safe_dump(fields))
    words = [sys.executable, "-c", BLOCKED, str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "odd.jsonl").write_text('{"foo": "bar"}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "bar"}\n')
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "blub"}')
    return tmp_path


def test_good_inputs_pass(folder: Path) -> None:
    data = {"path": str(folder / "chat.jsonl"), "chat_template": "chatml"}
    sets = [{"name": "a", "path": str(folder / "text.jsonl"), "every": 1}]
    assert checked(folder, data=data) == (0, "")
    assert checked(folder, data={"path": str(folder / "text.jsonl")}, eval={"sets": sets}) == (
        0,
        "",
    )
    assert checked(folder, data={"path": "@stdlib"}) == (0, "")


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"data": {"path": "DIR/no.txt"}}, "data.path = 'DIR/no.txt': no such file or folder"),
        (
            {"data": {"path": "DIR/odd.jsonl"}},
            "DIR/odd.jsonl, line 1: has no column text, which training on plain text needs; its"
            " columns are foo",
        ),
        (
            {"data": {"path": "DIR/chat.jsonl", "objective": "dpo"}, "train": {"steps": 1}},
            "DIR/chat.jsonl, line 1: ",
        ),
        ({"data": {"sources": [{"path": "DIR/odd.jsonl"}]}}, "DIR/odd.jsonl, line 1: "),
        (
            {"data": {"path": "@stdlib", "chat_template": "DIR/no.jinja"}},
            "data.chat_template = 'DIR/no.jinja': cannot read the file: No such file or directory",
        ),
        (
            {
                "data": {"path": "@stdlib"},
                "eval": {"sets": [{"name": "a", "path": "DIR/no.jsonl", "every": 1}]},
            },
            "eval.sets: set a: path = 'DIR/no.jsonl': no such file or folder",
        ),
        (
            {"data": {"path": "@stdlib"}, "adapter": {"path": "DIR/no"}},
            "adapter.path = 'DIR/no': is no folder; give the folder where PEFT saved an adapter",
        ),
        (
            {"data": {"path": "@stdlib"}, "model": {"path": "DIR/no"}},
            "model.path = 'DIR/no': no such folder; give a local folder in the Hugging Face layout",
        ),
        (
            {"data": {"path": "@stdlib"}, "model": {"path": "DIR"}},
            f"model_type of DIR/config.json = 'blub': transformers knows no such type; {SUPPORTED}",
        ),
        (
            {"data": {"path": "@stdlib"}, "model": {"hf": {"model_type": "lama"}}},
            "model.hf.model_type = 'lama': transformers knows no such type; try llama",
        ),
    ],
)
def test_bad_inputs_are_refused_without_torch(
    sections: dict[str, Any], error: str, folder: Path
) -> None:
    placed = json.loads(json.dumps(sections).replace("DIR", str(folder)))
    code, text = checked(folder, **placed)
    assert (code, text.startswith(f"penstock: {error.replace('DIR', str(folder))}")) == (2, True), (
        text
    )
