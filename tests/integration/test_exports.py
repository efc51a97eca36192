"""Exports are read by transformers 4.57 as by the version that this Penstock runs on."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.folders import TEXT, save_model

pytestmark = pytest.mark.integration

OLD = ("transformers==4.57.3", "tokenizers>=0.22,<0.23", "huggingface_hub>=0.34,<1.0")
LOSS = """
import json, sys
sys.path += sys.argv[2:]
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype="auto").eval()
stored = str(model.dtype)
ids = (torch.arange(200).reshape(2, 100) * 7) % 299
with torch.no_grad():
    loss = model.float()(input_ids=ids, labels=ids).loss.item()
print(json.dumps([transformers.__version__, stored, loss]))
"""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": {"rope_parameters": YARN},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with transformers 4.57; torch is the one of the tests."""
    folder = tmp_path_factory.mktemp("older")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *OLD], check=True)
    return python


def loss(python: Path, export: Path, *more: str) -> tuple[str, str, float]:
    """Returns version, type and loss of an export, as one transformers computes them."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    words = [str(python), "-c", LOSS, str(export), *more]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600.0)
    assert result.returncode == 0, result.stderr
    version, dtype, value = json.loads(result.stdout.splitlines()[-1])
    return version, dtype, value


@pytest.mark.parametrize("model_type", KINDS)
def test_an_export_is_read_as_meant(model_type: str, older: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "base", model_type, **SIZES, **KINDS[model_type])
    (tmp_path / "text.txt").write_text(TEXT * 4)
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "base"), "dtype": "bf16"},
        "data": {"path": str(tmp_path / "text.txt"), "sequence_length": 32},
        "train": {"steps": 2, "global_batch": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    penstock = str(Path(sys.executable).with_name("penstock"))
    subprocess.run([penstock, "train", str(tmp_path / "c.yaml")], check=True, timeout=600.0)
    out = tmp_path / "out"
    words = [penstock, "export", str(tmp_path / "run"), "--format", "hf", str(out)]
    subprocess.run(words, check=True, timeout=600.0)
    now = loss(Path(sys.executable), out)
    before = loss(older, out, *site.getsitepackages(), *sys.path)
    assert before[0].startswith("4.57") and now[0].startswith("5.")
    assert before[1] == now[1] == "torch.bfloat16"
    assert before[2] == pytest.approx(now[2], abs=1e-6)
