"""Model folders that would take all time or memory: ended in time, with the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from penstock.config.schema import parse_config
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError
from penstock.host.bounds import Bounds
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import resolve_hf_config
from tests.folders import save_model

SIZES = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


def over(tmp_path: Path, model: dict[str, Any], **data: Any) -> Any:
    """A configuration over some text."""
    (tmp_path / "text.txt").write_text("a" * 40 + " and no end of it\n" + "words " * 400)
    fields = {"path": str(tmp_path / "text.txt"), "sequence_length": 16, **data}
    return parse_config({"model": model, "data": fields, "train": {"steps": 1, "global_batch": 1}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layer", 10**9),
        ("num_hidden_layers", 1e9),
        ("num_hidden_layers", 10**4000),
        ("num_local_experts", 10**7),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
def test_a_billion_layers_are_refused_at_once(key: str, value: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(folder, "gpt2", **SIZES)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=rf"{key}.* of .*config.json = .*: is more than 10,000"):
        prepare(over(tmp_path, {"path": str(folder)}), tmp_path / "run")
    config = over(tmp_path, {"hf": {"model_type": "gpt2", key: value}}, tokenizer="byte")
    with pytest.raises(ConfigError, match=rf"model.hf.{key}.* = .*: is more than 10,000"):
        resolve_hf_config(config, tokenizer_vocab_size=257, eos=256)


def test_what_never_returns_is_ended_by_its_own_time() -> None:
    """Also inside of a call that no handler of Python interrupts; its parent says which."""
    program = (
        "import sys\n"
        "from penstock.host.bounds import Bounds\n"
        "with Bounds(alone=True).within('encoding this', 1.0):\n"
        "    while True: sum(range(1 << 40))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == -signal.SIGPROF
    assert done.stderr.startswith("penstock: encoding this: the process was ended from outside, or")


def test_a_pattern_that_backtracks_is_named(tmp_path: Path) -> None:
    """The library in Rust gives up by a panic, which is no Exception."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<eos>": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"^((a+)+)+$"), "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path / "pattern.json"
    tokenizer.save(str(path))
    config = over(tmp_path, {"hf": {"model_type": "gpt2", **SIZES}}, tokenizer=str(path))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "resolved.yaml").write_text(config.to_yaml())
    complaint = r"pattern.json': encoding documents: Onig: .*retry-limit"
    with pytest.raises(ConfigError, match=complaint):
        prepare(config, run_dir)


def test_an_allocation_that_fails_is_named() -> None:
    complaint = "^opening it: takes more memory than there is$"
    with pytest.raises(ConfigError, match=complaint), Bounds().within("opening it", 1.0):
        raise MemoryError


def test_an_interrupt_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt), Bounds().within("opening it", 1.0):
        raise KeyboardInterrupt


def test_the_last_words_of_a_process_that_was_killed_become_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "killed_by_itself.py"
    module.write_text(
        "import os, signal\n"
        "from penstock.host.bounds import Bounds\n"
        "with Bounds(alone=True).within('opening it', 60.0):\n"
        "    os.kill(os.getpid(), signal.SIGABRT)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(ConfigError, match=r"^opening it: the process was ended from outside, or"):
        run_tool("killed_by_itself")
