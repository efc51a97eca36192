"""The first hour of a user: the wheel in an empty environment, and a model that was fine-tuned on a
file of conversations.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.sft import make

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 12
MESSAGES = [{"role": "user", "content": "river stone"}]
ANSWER = f"""
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("out")
tokenizer = AutoTokenizer.from_pretrained("out")
inputs = tokenizer.apply_chat_template(
    {MESSAGES!r}, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
ids = model.generate(**inputs, max_new_tokens={NEW_TOKENS}, do_sample=False)[0]
print(json.dumps(ids[inputs["input_ids"].shape[1] :].tolist()))
"""
"""Generates with the export by transformers alone."""


def commands_of_readme() -> list[str]:
    """The commands of README that fine-tune, in order."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```\n(penstock init --model.*?)```", text, re.DOTALL)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


@pytest.fixture(name="bin", scope="module")
def _bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that has the wheel, and what pip installs with it."""
    folder = tmp_path_factory.mktemp("wheel")
    commands = folder / "env" / "bin"
    torch = os.environ.get("TORCH", "torch==2.13.0")
    for words in (
        (sys.executable, "-m", "venv", folder / "env"),
        (commands / "pip", "install", "--quiet", torch),
        (commands / "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT),
    ):
        subprocess.run(words, check=True, timeout=1800.0)
    (wheel,) = folder.glob("penstock-*.whl")
    install = (commands / "pip", "install", "--quiet", wheel, torch)
    subprocess.run(install, check=True, timeout=1800.0)
    return commands


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A folder with a model, its tokenizer and template, and a file of conversations."""
    make.save(tmp_path / "models/Qwen3-0.6B-Base", "qwen2_5")
    lines = [json.dumps(record) for record in make.records("messages")[:100]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat.json").write_text(json.dumps(MESSAGES))
    return tmp_path


def ran(folder: Path, *words: str | Path) -> str:
    """Runs a command in the folder; returns its output."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600.0
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_commands_of_readme_fine_tune_a_model(bin: Path, folder: Path) -> None:
    commands = commands_of_readme()
    assert [words.split()[1] for words in commands] == ["init", "data", "train"]
    for words in commands:
        name, *options = words.split()
        ran(folder, bin / name, *options)
    answer = json.loads(
        ran(
            folder,
            *(bin / "penstock", "generate", "runs/mine", "--messages", "chat.json"),
            *("--max-new", str(NEW_TOKENS), "--json"),
        )
    )
    ran(folder, bin / "penstock", "export", "runs/mine", "--format", "hf", "out")
    by_transformers = json.loads(ran(folder, bin / "python", "-c", ANSWER))
    assert by_transformers
    assert answer["ids"] == by_transformers
