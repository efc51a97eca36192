"""Export of a whole model of several parts, from the folder that a run came from. The text model's
trained tensors replace the folder's; all others stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import Weights
from penstock.models.checkpoints.files import files_beside, recorded_files
from penstock.models.surgery.hf import folder_composite, load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.rundir import RunDirectory

ReadTensors = Callable[[int], Mapping[str, torch.Tensor]]
"""Block -> its tensors by their names in the text model."""


def write_whole(run_dir: Path, read_tensors: ReadTensors, directory: Path) -> None:
    """Writes the files of ``model.path`` into ``directory``. Trained tensors have the types of the
    tensors that they replace.

    Raises:
        ConfigError: the run's model is not the text model of a folder.
        StateError: the folder is gone, damaged, or of another model by now.
    """
    run = RunDirectory(run_dir)
    source = run.config.model.path
    composite = None if source is None else folder_composite(source)
    if source is None or composite is None:
        raise ConfigError(
            f"--whole: {run_dir} does not train the text model of a larger one; leave --whole out"
        )
    files = recorded_files(run_dir, source)
    skeleton = build_skeleton(load_run_config(run_dir))
    weights = Weights(skeleton, Checkpoint(source, files), composite)
    weights.check(run.table)
    block_of = {
        name: block.index
        for block in run.table.blocks
        for tensor in block.tensors
        for name in weights.sources_of(tensor.name)
    }
    for file_name in files:
        _write_file(source / file_name, directory / file_name, block_of, weights, read_tensors)
    others = {*files, *files_beside(source, files)}
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        if path.is_file() and name not in others and not name.startswith("."):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / name)
    for path in source.glob("*.safetensors.index.json"):
        if len(files) > 1:
            shutil.copyfile(path, directory / path.name)


def _write_file(
    source: Path,
    target: Path,
    block_of: Mapping[str, int],
    weights: Weights,
    read_tensors: ReadTensors,
) -> None:
    try:
        with safe_open(source, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise StateError(f"{source}: {error}") from error
    for block in sorted({block_of[name] for name in tensors if name in block_of}):
        trained = weights.published(read_tensors(block))
        for name in tensors.keys() & trained.keys():
            tensors[name] = trained[name].to(tensors[name].dtype).contiguous()
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, metadata={"format": "pt"})
