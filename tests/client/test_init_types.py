"""The configuration that ``penstock init`` writes is one that ``penstock train`` prepares, for
models of all causal types.
"""

from __future__ import annotations

import importlib
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from penstock.client.planning import data_rows, estimate, starting
from penstock.client.planning.starting import Start, write_start
from penstock.client.views.progress import Working
from penstock.config.schema import load_config
from penstock.daemons.node.preparing import tool
from penstock.daemons.node.preparing.places import with_absolute_paths
from penstock.host.errors import ConfigError, PenstockError
from penstock.models.data.rows.row_file import RowLayout
from penstock.models.prepare import prepare
from penstock.models.surgery.skeleton import build_skeleton, predicts_masked
from penstock.protocol.run.rundir import RunDirectory
from tests.client.test_init import chats
from tests.folders import save_tokenizer
from tests.worker.causal_types import MAX_PARAMETERS, TYPES, reduced

VOCABULARY = ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input")


def inline(module: str, *words: str, progress: Callable[[str], None] = print, **_: Any) -> None:
    """Runs a tool in this process: a hundred starts would take an hour."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = importlib.import_module(module).main([*words])
    if code:
        raise ConfigError(err.getvalue().strip().splitlines()[-1].removeprefix("penstock: "))
    for line in out.getvalue().splitlines():
        progress(line)


def saved(model_type: str, folder: Path) -> bool:
    """Whether a tiny model of the type, and a tokenizer, could be saved."""
    try:
        hf_config = reduced(model_type)
        for key in VOCABULARY:
            if hasattr(hf_config, key):
                setattr(hf_config, key, 320)
        if predicts_masked(hf_config):
            return False
        skeleton = build_skeleton(hf_config)
        if sum(parameter.numel() for parameter in skeleton.model.parameters()) > MAX_PARAMETERS:
            return False
        model = AutoModelForCausalLM.from_config(hf_config)
        model.save_pretrained(folder)
    except Exception:  # the type is not one of those that are trained, or takes no such sizes
        return False
    save_tokenizer(folder)
    return True


def outcome(model_type: str, folder: Path) -> str:
    """The packing of the rows that are prepared with the written configuration; empty for types
    that cannot be trained.
    """
    if not saved(model_type, folder / "model"):
        return ""
    data = folder / "chats.jsonl"
    data.write_text(chats(40))
    target = folder / "mine.yaml"
    start = Start(model=folder / "model", data=str(data), output=target)
    write_start(start, Working("reading", None, lambda line: None))
    config = with_absolute_paths(load_config(target))
    run = RunDirectory.create(folder / "run")
    (run.path / "resolved.yaml").write_text(config.to_yaml())
    prepare(config, run.path)
    layout = RowLayout.of(json.loads((run.path / "data" / "meta.json").read_text())["train"])
    assert layout is not None
    return layout.packing


@pytest.fixture(name="inlined", autouse=True)
def _inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (data_rows, estimate, starting, tool):
        if hasattr(module, "run_tool"):
            monkeypatch.setattr(module, "run_tool", inline)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("model_type", "packing"),
    [
        ("llama", "best-fit"),
        ("gpt_oss", "none"),
        ("recurrent_gemma", "none"),
        ("opt", "none"),
        ("doge", "best-fit"),
    ],
)
def test_train_takes_what_init_writes(model_type: str, packing: str, tmp_path: Path) -> None:
    assert outcome(model_type, tmp_path) == packing


@pytest.mark.slow
def test_train_takes_what_init_writes_for_each_type(tmp_path: Path) -> None:
    refused: dict[str, str] = {}
    packings: dict[str, str] = {}
    for model_type in TYPES:
        (tmp_path / model_type).mkdir()
        try:
            packings[model_type] = outcome(model_type, tmp_path / model_type)
        except PenstockError as error:
            refused[model_type] = str(error)
        shutil.rmtree(tmp_path / model_type)
    for packing in ("best-fit", "none", ""):
        print(
            packing or "not trained", *(name for name, made in packings.items() if made == packing)
        )
    assert not refused
    assert len([name for name, packing in packings.items() if packing]) > 100
