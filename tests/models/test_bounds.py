"""Model folders that would take all time or memory: ended in time, with the cause."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from penstock.config.adapter import AdapterConfig
from penstock.config.schema import parse_config
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError
from penstock.host.limits import bounds
from penstock.host.limits.bounds import Bounds, limited
from penstock.models.adapters.settings import resolved
from penstock.models.data.chat import forms, templates
from penstock.models.data.chat.requests import Turn
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import resolve_hf_config
from tests.folders import save_model
from tests.hostile import BACKTRACKING, LOOPS

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
        "from penstock.host.limits.bounds import Bounds\n"
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
        "from penstock.host.limits.bounds import Bounds\n"
        "with Bounds(alone=True).within('opening it', 60.0):\n"
        "    os.kill(os.getpid(), signal.SIGABRT)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(ConfigError, match=r"^opening it: the process was ended from outside, or"):
        run_tool("killed_by_itself")


def test_python_code_without_an_end_is_named_with_its_seconds() -> None:
    """Blocks nest, and the inner one ends alone."""
    with limited("outer", 60.0):
        with pytest.raises(ConfigError, match=r"^inner: takes over 0 s of CPU time; stop$"):
            with limited("inner", 0.2, remedy="; stop"):
                while True:
                    with suppress(Exception):
                        sum(range(1000))
        left_s, _ = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 0 < left_s < 60
    with pytest.raises(ConfigError, match=r"^outer: takes over 0 s of CPU time$"):
        with limited("outer", 0.3), limited("inner", 60.0):
            while True:
                pass
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_memory_beyond_the_room_is_refused_and_the_limit_returns() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ConfigError, match=r"^text: takes more memory than there is$"):
        with limited("text", 60.0, 1 << 28):
            assert len("a" * (1 << 30))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with limited("text", 60.0, 1 << 31):
        assert len("a" * (1 << 20)) == 1 << 20


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("targets", {"targets": BACKTRACKING}),
        ("exclude", {"targets": ["c_attn"], "exclude": BACKTRACKING}),
        ("rank_pattern", {"targets": ["c_attn"], "rank_pattern": {BACKTRACKING: 4}}),
        ("alpha_pattern", {"targets": ["c_attn"], "alpha_pattern": {BACKTRACKING: 4}}),
    ],
)
def test_an_expression_that_backtracks_is_named_with_its_key(
    key: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "_MATCHING_S", 0.5)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, vocab_size=8))
    complaint = rf"adapter\.{key} = .*: matching names: takes over .* of CPU time; give names, or"
    with pytest.raises(ConfigError, match=complaint):
        resolved(AdapterConfig(**fields), model)


@pytest.mark.parametrize("text", ["a{99999999999}", "(" * 5000 + ")" * 5000])
def test_an_expression_that_cannot_be_compiled_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is no regular expression"):
        AdapterConfig(targets=text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LOOPS, "takes over .* s of CPU time"),
        ("{{ 'a' * 10**10 }}", "takes more memory than there is"),
        ("{% set a = messages[0].role * 10**10 %}", "takes more memory than there is"),
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_takes_all_is_named(
    text: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_RENDERING_S", 0.5)
    turns = (Turn(fields={"role": "user", "content": "a"}),)
    conversation = templates.Conversation(place="a.jsonl, line 1", turns=turns)
    match = rf"a\.jsonl, line 1: data\.chat_template = 'model' cannot render .*: .*{complaint}"
    with pytest.raises(ConfigError, match=match):
        conversation.render(templates.Template(name="model", text=text))
