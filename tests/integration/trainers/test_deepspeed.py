"""DeepSpeed in an environment of its own: a training moves from it to Penstock, and back.

Both train the same rows with the same settings. The losses after the move are those of the trainer
that goes on without a move. ``-s`` shows the largest relative differences.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.models.exchange.readers import open_checkpoint
from tests.integration.trainers.environments import DEEPSPEED, answer, environment, ran
from tests.system import conftest as H

pytestmark = pytest.mark.integration

STEPS, MOVED, ROWS, LENGTH, VOCABULARY = 40, 20, 4, 16, 260
OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
DECAYED = {"groups": [{"match": ["model", "lm_head"], "weight_decay": 0.1}]}
"""Weight decay of all parameters, as of a single group there."""
MODULE = "tests.integration.trainers.deepspeed_training"
CONVERT = "deepspeed.checkpoint.ds_to_universal"
TOLERANCE = 1e-6
BF16_BOUND = 2e-3
"""Relative difference of losses in bf16, where both sum in their own order. Measured: 5.6e-4."""
runner = H.runner


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with DeepSpeed."""
    return environment(tmp_path_factory.mktemp("deepspeed"), DEEPSPEED)


def new_model(folder: Path, **changes: Any) -> Path:
    """Writes a tiny Llama; returns its folder."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_model(tmp_path_factory.mktemp("model"))


def rows() -> list[list[list[int]]]:
    """Returns token ids by step, row and position."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 250, (STEPS, ROWS, LENGTH), generator=generator)
    values: list[list[list[int]]] = ids.tolist()
    return values


def deepspeed_losses(python: Path, folder: Path, model: Path, **changes: Any) -> Sequence[float]:
    """Trains there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = {"model": str(model), "rows": rows(), "ranks": 2, "optimizer": OPTIMIZER}
    path = folder / "settings.json"
    path.write_text(json.dumps({**settings, "steps": [0, STEPS], "port": port, **changes}))
    losses: Sequence[float] = answer(python, MODULE, str(path))
    return losses


def continued(python: Path, folder: Path, model: Path, out: Path, **zero: Any) -> Sequence[float]:
    """Trains there from a universal checkpoint."""
    steps = [MOVED, STEPS]
    changes = {"steps": steps, "load": str(out), "universal": True, **zero}
    return deepspeed_losses(python, folder, model, **changes)


def universal(python: Path, saved: Path, tag: str, out: Path) -> Path:
    """Converts a checkpoint by DeepSpeed's own tool."""
    words = ("--input_folder", str(saved / tag), "--output_folder", str(out / tag))
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
    ran(python, CONVERT, *words, *workers, "--inject_missing_state")
    (out / "latest_universal").write_text(tag)
    return out


def configured(runner: Any, model: Path, name: str, changes: dict[str, Any]) -> Path:
    """Returns a configuration with DeepSpeed's settings and rows."""
    data = runner.root / "rows.jsonl"
    lines = [json.dumps({"input_ids": row, "labels": row}) for step in rows() for row in step]
    data.write_text("\n".join(lines))
    fields = {
        "run": {"name": name, "dir": str(runner.root / name)},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {
            **{"sources": [{"path": str(data)}], "tokenizer": "byte", "sequence_length": LENGTH},
            **{"packing": "none", "shuffle": False},
        },
        "train": {"steps": STEPS, "global_batch": ROWS, "clip_grad_norm": None},
        "optimizer": {**OPTIMIZER, "warmup_steps": 0, "schedule": "constant"},
        "cluster": {"workers": 1},
    }
    path: Path = runner.root / f"{name}.yaml"
    path.write_text(json.dumps(H.merge(fields, changes)))
    return path


def imported(runner: Any, source: Path, config: Path, *options: str) -> Path:
    """Does the work of ``penstock import``; returns the run's directory."""
    run_dir: Path = runner.root / config.stem
    words = ("import", source, "--config", config, "--run-dir", run_dir, "--verify")
    code, output = runner.call(*words, *options)
    assert code == 0, output
    return run_dir


def exported(runner: Any, run_dir: Path, out: Path, step: int) -> Path:
    """Does the work of ``penstock export``; returns the folder."""
    words = ("export", run_dir, out, "--format", "universal", "--step", str(step), "--verify")
    code, output = runner.call(*words)
    assert code == 0, output
    return out


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in H.metrics(run_dir)]


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference."""
    pairs = zip(losses, expected, strict=True)
    return max(abs(loss - other) / abs(other) for loss, other in pairs)


@pytest.mark.parametrize(
    ("stage", "groups"), [(1, True), (2, True), (3, False), (3, True)], ids=str
)
def test_a_training_moves_here_and_back(
    stage: int, groups: bool, python: Path, model: Path, runner: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "deepspeed"
    zero = {"stage": stage, "groups": groups}
    keeping = {"save": str(saved), "tag": "moved", "save_at": MOVED}
    stayed = deepspeed_losses(python, tmp_path, model, **zero, **keeping)
    changes = {} if groups else {"optimizer": DECAYED}
    config = configured(runner, model, "moved", changes)
    run_dir = imported(runner, saved, config)
    out = exported(runner, run_dir, tmp_path / "back", MOVED)
    _compare(saved, out)
    back = continued(python, tmp_path, model, out, **zero, own_steps=stage == 3 and groups)
    runner.train(config)
    here, rest = losses_of(run_dir)[-(STEPS - MOVED) :], stayed[MOVED:]
    print(f"stage {stage}: here {difference(here, rest):.1e}, back {difference(back, rest):.1e}")
    assert here == pytest.approx(rest, rel=TOLERANCE)
    assert back == pytest.approx(rest, rel=TOLERANCE)


def _compare(saved: Path, out: Path) -> None:
    """Compares the numbers of DeepSpeed's checkpoint with those of the export."""
    first = {(t.name, t.role): t.load() for t in open_checkpoint(saved).tensors}
    second = {(t.name, t.role): t.load() for t in open_checkpoint(out).tensors}
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture(scope="module")
def started_here(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    shelf: Any,
    forking: Any,
) -> tuple[Path, Sequence[float]]:
    """The universal checkpoint of a run's step 20, and the losses of the run's next 20 steps."""
    here = H.Runner(tmp_path_factory.mktemp("here"), shelf, forking)
    try:
        saving = {"save_every": MOVED, "keep_snapshots": 2}
        run_dir = here.train(configured(here, model, "here", {"train": saving}))
        out = exported(here, run_dir, here.root / "universal", MOVED)
    finally:
        here.stop_all()
    return out, losses_of(run_dir)[MOVED:]


@pytest.mark.parametrize(
    ("stage", "kind", "ranks"),
    [
        *((stage, "torch", 2) for stage in (1, 2, 3)),
        *((stage, "fused", ranks) for stage, ranks in ((1, 1), (3, 2))),
        *((stage, "cpu", 4) for stage in (2, 3)),
    ],
)
def test_a_run_of_penstock_goes_on_in_every_stage(
    stage: int, kind: str, ranks: int, python: Path, model: Path, started_here: Any, tmp_path: Path
) -> None:
    """The optimizers are torch's AdamW, and DeepSpeed's FusedAdam and CPUAdam."""
    out, stayed = started_here
    zero = {"stage": stage, "kind": kind, "ranks": ranks, "own_steps": stage == 3}
    losses = continued(python, tmp_path, model, out, **zero)
    print(f"stage {stage}, {kind}, {ranks} ranks: {difference(losses, stayed):.1e}")
    assert losses == pytest.approx(stayed, rel=TOLERANCE)


def test_stage_3_gives_its_sub_groups_one_step(
    python: Path, model: Path, started_here: Any, tmp_path: Path
) -> None:
    """DeepSpeed 0.19.8 counts the step of a loaded universal checkpoint once for each sub-group.
    Two lines in docs/CHECKPOINTS.md give each sub-group its own step.
    """
    out, stayed = started_here
    losses = continued(python, tmp_path, model, out, stage=3)
    print(f"stage 3 with a shared step: {difference(losses, stayed):.1e}")
    assert losses[0] == pytest.approx(stayed[0], rel=TOLERANCE)
    assert losses != pytest.approx(stayed, rel=TOLERANCE), "the lines are not needed any more"


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ADAPTED = {"adapter": {"r": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}}

ODD: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "tied": ({"stage": 1}, {}, False),
    "tied in stage 3": ({"stage": 3}, {}, True),
    "frozen": ({"stage": 2, "frozen": ["model.embed_tokens"]}, {}, False),
    "frozen in stage 3": ({"stage": 3, "frozen": ["model.embed_tokens", "model.norm"]}, {}, False),
    "frozen, converted": ({"stage": 3, "frozen": ["model.embed_tokens", "model.norm"]}, {}, True),
    "sub-groups": ({"stage": 3, "zero": {"sub_group_size": 40}}, {}, False),
    "before the first step": ({"stage": 1, "save_at": 0}, {}, False),
    "adapter": ({"stage": 2, "adapter": LORA, "light": True}, ADAPTED, False),
    "adapter in stage 3": ({"stage": 3, "adapter": LORA}, ADAPTED, False),
    "adapter, converted": ({"stage": 3, "adapter": LORA, "light": True}, ADAPTED, True),
    "bf16": ({"stage": 1, "dtype": "bf16"}, {"model": {"dtype": "bf16"}}, False),
}
"""Settings there, settings here, and whether DeepSpeed converts the checkpoint first."""


@pytest.mark.parametrize("name", ODD)
def test_odd_checkpoints_go_on_here_and_back(
    name: str, python: Path, model: Path, runner: Any, tmp_path: Path
) -> None:
    zero, changes, is_converted = ODD[name]
    if "tied" in name:
        model = new_model(tmp_path / "model", tie_word_embeddings=True)
    saved, moved = tmp_path / "deepspeed", zero.get("save_at", MOVED)
    keeping = {"save": str(saved), "tag": "moved", "save_at": moved}
    stayed = deepspeed_losses(python, tmp_path, model, **keeping | zero)
    source = universal(python, saved, "moved", tmp_path / "converted") if is_converted else saved
    if "frozen" in zero:
        changes = {"train": {"freeze": zero["frozen"]}}
    config = configured(runner, model, "odd", changes)
    if name == "before the first step":
        _refuse(runner, source, config, "has no state of an optimizer", "--weights-only")
        _refuse_damage(runner, source, config)
        run_dir = imported(runner, source, config, "--weights-only")
    else:
        run_dir = imported(runner, source, config)
    rest = stayed[moved:][: STEPS - MOVED]
    bound = BF16_BOUND if name == "bf16" else TOLERANCE
    if moved == MOVED and "adapter" not in zero:
        out = exported(runner, run_dir, tmp_path / "back", MOVED)
        back = continued(python, tmp_path, model, out, **zero, own_steps=zero["stage"] == 3)
        print(f"{name}, back: {difference(back, rest):.1e}")
        assert back == pytest.approx(rest, rel=bound)
    runner.train(config)
    here = losses_of(run_dir)[moved - STEPS :][: STEPS - MOVED]
    print(f"{name}: {difference(here, rest):.1e}")
    assert here == pytest.approx(rest, rel=bound)


def _refuse(runner: Any, source: Path, config: Path, *parts: str) -> None:
    """Imports a checkpoint that is refused: a clear error, and nothing is written."""
    run_dir = runner.root / config.stem
    code, output = runner.call("import", source, "--config", config, "--run-dir", run_dir)
    assert code == 2, output
    assert all(part in output for part in parts), output
    assert not run_dir.exists()


def _refuse_damage(runner: Any, source: Path, config: Path) -> None:
    """Imports the checkpoint with a truncated file, and without the file."""
    copied = shutil.copytree(source, runner.root / "damaged")
    path = copied / "moved" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    _refuse(runner, copied, config, path.name, "copy the checkpoint again")
    path.unlink()
    _refuse(runner, copied, config, path.name, "is missing", "copy the files of all ranks")
