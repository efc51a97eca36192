"""Lost and damaged files of a run's base: made again of the model, or left as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.client.commands.states import snapshots
from penstock.client.export import verified_state
from penstock.client.states import mend_base
from penstock.config.schema import parse_config
from penstock.daemons.memory import saving
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.restore import Filling, restore
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import StateError
from penstock.models.checkpoints.loader import fill
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import NodeMemory
from tests.folders import save_model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}


def never() -> bool:
    return False


def write_manifest(memory: NodeMemory, state: Path, files: tuple[WrittenFile, ...]) -> None:
    listed: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for file in files:
        listed[file.base][file.name] = {"bytes": file.num_bytes, "sha256": file.sha256}
    fields = {
        "format": 2,
        "run_id": memory.spec.run_id,
        "version": 7,
        "table_digest": memory.spec.table.digest,
        "files": listed[False],
        "base": listed[True],
        "scheduler": {},
    }
    (state / "manifest.json").write_text(json.dumps(fields))


@pytest.fixture(params=["folder", "seed"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunDirectory]:
    """A run with a saved state, frozen layers in bf16, and a model from a folder or a seed."""
    (tmp_path / "text.txt").write_text("abcdefgh " * 200)
    model: dict[str, Any] = {"hf": {"model_type": "llama", **SIZES}}
    if request.param == "folder":
        save_model(tmp_path / "model", "llama", seed=1, vocab_size=257, **SIZES)
        model = {"path": str(tmp_path / "model")}
    config = parse_config(
        {
            "model": {**model, "dtype": "bf16"},
            "data": {
                "path": str(tmp_path / "text.txt"),
                "tokenizer": "byte",
                "sequence_length": 16,
            },
            "train": {"steps": 2, "global_batch": 4, "freeze": ["layers", "embed"]},
            "cluster": {"workers": 1},
        }
    )
    directory = prepare_run(config, tmp_path / "run")
    memory = NodeMemory.create(directory.memory_spec(0))
    hf_config = load_run_config(directory.path)
    load = Filling(incarnation=1, version=7, source=None)
    restore(memory, load, lambda cancelled: fill(memory, directory, hf_config), never, [0])
    state = directory.state_dir / "step-00000007"
    write_manifest(memory, state, saving.save(PinnedVersion(memory, 7), state, never))
    memory.unlink()
    memory.close()
    yield directory


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def base_of(run: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted((run.state_dir / "base").iterdir())}


def test_files_of_the_base_are_made_again_with_their_bytes(run: RunDirectory) -> None:
    whole, lines = base_of(run), list[str]()
    assert len(whole) == 3
    mend_base(run.path, lines.append)
    assert lines == [] and base_of(run) == whole
    first, second, third = whole
    harms: list[tuple[Path, Callable[[Path], None]]] = [(first, lose), (second, cut)]
    for path, harm in harms:
        harm(path)
    mend_base(run.path, lines.append)
    assert base_of(run) == whole
    assert [line.partition(":")[0] for line in lines] == [str(first), str(second)]
    assert all("was lost or damaged, and is made again of" in line for line in lines)
    flip(third)
    mend_base(run.path, lines.append)
    assert len(lines) == 2, "sizes do not show the damage"
    assert verified_state(run.path, None).path.name == "step-00000007"
    assert base_of(run) == whole
    flip(third)
    with pytest.raises(typer.Exit) as ended:
        snapshots(run.path, "verify", None, False)
    assert ended.value.exit_code == 0
    assert base_of(run) == whole


def test_other_weights_of_the_model_leave_the_error(run: RunDirectory) -> None:
    path = next(iter(base_of(run)))
    path.unlink()
    folder = run.config.model.path
    if folder is None:
        (run.path / "inputs.json").unlink()  # as in a run of an older Penstock
        resolved = run.path / "resolved.yaml"
        resolved.write_text(resolved.read_text().replace("seed: 1234", "seed: 4"))
    else:
        save_model(folder, "llama", seed=2, vocab_size=257, **SIZES)
    lines: list[str] = []
    mend_base(run.path, lines.append)
    assert len(lines) == 1 and "gives other weights now" in lines[0]
    assert not path.exists()
    with pytest.raises(StateError, match=path.name):
        verified_state(run.path, None)
    if folder is not None:
        folder.rename(folder.with_name("elsewhere"))
        mend_base(run.path, lines.append)
        assert "a lost or damaged file cannot be made again" in lines[-1]
