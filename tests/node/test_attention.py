"""model.attention: chosen before the first step, kept by a resume, refused where impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config.schema import Config, load_config
from penstock.daemons.node.preparing.changes import find_changes, fixed_values
from penstock.daemons.node.preparing.layers import keep_attention, with_attention
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import ConfigError
from penstock.host.files import write_atomically
from penstock.models.kernels import _candidates
from penstock.protocol.run.rundir import RunDirectory
from tests.node.test_prepare import config

FLASH, MATH = "flash_attention_for_cpu", "math"
CUDNN = "model.attention=cudnn"
FAST = "model.deterministic=false"
CUDA = "cluster.device=cuda"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return f"data.path={text}"


def forward_of(run_dir: Path) -> str:
    """Returns the kernel of a run's forwards, by its recipe."""
    recipe = RunDirectory(run_dir).numerics
    assert recipe is not None
    [layer] = recipe.layers
    return layer.attention.forward


@pytest.mark.parametrize("name", ["efficient", "cudnn-flash"])
def test_cpus_refuse_kernels_of_gpus(name: str) -> None:
    config(f"model.attention={name}", CUDA)
    with pytest.raises(ConfigError, match=rf"model\.attention {name} runs on GPUs alone.*'cpu'"):
        config(f"model.attention={name}")


def test_kernels_that_repeat_no_bits_are_refused() -> None:
    assert config(CUDNN, FAST, CUDA).model.attention == "cudnn"
    with pytest.raises(ConfigError, match=r"cudnn: .* repeats no bits.*cudnn-flash or auto"):
        config(CUDNN, CUDA)


def test_auto_takes_cudnn_where_bits_need_not_repeat_and_the_gpu_is_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def candidates(major: int, *overrides: str) -> tuple[str, ...]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        return _candidates(config(CUDA, *overrides), torch.device("cuda", 0))

    assert candidates(9, FAST) == ("cudnn", "sdpa")
    assert candidates(9) == candidates(8, FAST) == candidates(10, FAST) == ("sdpa",)
    assert candidates(9, FAST, "model.attention=flash") == ("flash",)
    assert (
        _candidates(config(FAST), torch.device("cpu"))
        == _candidates(config(CUDA, FAST), None)
        == ("sdpa",)
    )


def test_a_run_keeps_its_choice() -> None:
    def kept(asked: Config, previous: Config | None) -> str:
        return keep_attention(asked, previous).model.attention

    assert kept(config(), None) == kept(config(), config()) == "auto"
    math = with_attention(config(), "math")
    assert kept(config(), math) == "math"
    assert kept(with_attention(config(), "flash"), math) == "flash"
    assert kept(config(CUDA), math) == "auto", "another device"
    [change] = find_changes(config(), math)
    assert change.allowed and "round differently" in str(change)
    assert "model.attention" not in fixed_values(config())


def test_a_resume_changes_attention_in_words_alone(tmp_path: Path, corpus: str) -> None:
    run_dir, words = tmp_path / "run", list[str]()
    prepare_run(config(corpus), run_dir)
    assert load_config(run_dir / "resolved.yaml").model.attention == "sdpa"
    assert forward_of(run_dir) == FLASH
    prepare_run(config(corpus, "model.attention=math"), run_dir)
    assert forward_of(run_dir) == MATH
    prepare_run(config(corpus), run_dir)
    assert forward_of(run_dir) == FLASH, "before the first step auto chooses anew"
    (run_dir / "journal.sqlite").touch()
    made = (run_dir / "table.json").stat().st_mtime_ns
    first = RunDirectory(run_dir).numerics_digest
    prepare_run(config(corpus, "model.attention=math"), run_dir, words.append)
    assert words == [
        "changed: model.attention: 'sdpa' -> 'math'"
        " (layers round differently from the next step on)",
        "trains all 13,424 parameters",
    ]
    assert forward_of(run_dir) == MATH and RunDirectory(run_dir).numerics_digest != first
    words.clear()
    prepare_run(config(corpus), run_dir, words.append)
    assert (words, forward_of(run_dir)) == (["trains all 13,424 parameters"], MATH)
    assert load_config(run_dir / "resolved.yaml").model.attention == "math"
    prepare_run(config(corpus, "model.attention=sdpa"), run_dir)
    assert RunDirectory(run_dir).numerics_digest == first
    assert (run_dir / "table.json").stat().st_mtime_ns == made


def test_a_run_of_before_the_key_keeps_what_it_had(tmp_path: Path, corpus: str) -> None:
    """Written by hand as an older version wrote the files: without the key, and without a choice
    among the kernels.
    """
    run_dir, words = tmp_path / "run", list[str]()
    prepare_run(config(corpus, "model.attention=math"), run_dir)
    prepare_run(config(corpus, "model.attention=sdpa"), run_dir)
    digest = RunDirectory(run_dir).numerics_digest
    for name, line in (("resolved.yaml", "  attention: sdpa\n"), ("model/kernels.json", "")):
        text = (run_dir / name).read_text()
        line = line or ' "choice": "sdpa",\n'
        assert line in text
        RunDirectory(run_dir).remove_checksums()
        write_atomically(run_dir / name, text.replace(line, ""))
    (run_dir / "journal.sqlite").touch()
    prepare_run(config(corpus), run_dir, words.append)
    assert not any("changed" in line for line in words)
    assert load_config(run_dir / "resolved.yaml").model.attention == "sdpa"
    assert RunDirectory(run_dir).numerics_digest == digest


GPT2 = "model.hf={model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64}"
GEMMA2 = (
    "model.hf={model_type: gemma2, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}"
)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GPT2, r"layers of kind 'GPT2Block' cannot use flash: .*dropout"),
        (GEMMA2, r"no layer calls attention through torch \(soft caps"),
    ],
)
def test_a_start_is_refused_where_layers_cannot_use_the_kernel(
    tmp_path: Path, corpus: str, model: str, words: str
) -> None:
    wanted = rf"model\.attention = 'flash': {words}.*set model\.attention to auto"
    with pytest.raises(ConfigError, match=wanted):
        prepare_run(config(corpus, model, "model.attention=flash"), tmp_path / "run")
    assert not (tmp_path / "run" / "journal.sqlite").exists()
    prepare_run(config(corpus, model), tmp_path / "run")


def test_a_refused_change_leaves_the_run_as_it_was(tmp_path: Path, corpus: str) -> None:
    run_dir = tmp_path / "run"
    prepare_run(config(corpus, GPT2), run_dir)
    (run_dir / "journal.sqlite").touch()
    names = ("resolved.yaml", "model/kernels.json", "numerics.json")
    before = [(run_dir / name).read_bytes() for name in names]
    with pytest.raises(ConfigError, match="cannot use flash"):
        prepare_run(config(corpus, GPT2, "model.attention=flash"), run_dir)
    assert [(run_dir / name).read_bytes() for name in names] == before
