"""Constants of a model: persistent buffers that files contain and training never changes.

An example is the bias by which a router spreads its tokens. ``RUN_DIR/model/constants.safetensors``
holds the constants under the model's names, in the types in which transformers loads them. The file
is made with the block table, and its checksum is kept with the run's inputs. Workers read the file
with the model; exports write its tensors with those of their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import PretrainedConfig

from penstock.host.errors import ConfigError, StateError
from penstock.host.files import write_atomically
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.conversion import Weights, folded
from penstock.models.checkpoints.files import few
from penstock.models.surgery.skeleton import Skeleton, loaded_dtypes
from penstock.protocol.run.checksums import CONSTANTS, read_checked
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable, DType

Constants = Mapping[str, torch.Tensor]
"""Buffers by their names in the model, on the CPU."""


def initial_constants(
    hf_config: PretrainedConfig, skeleton: Skeleton, dtype: DType, weights: Weights | None
) -> dict[str, torch.Tensor]:
    """Returns the constants of a run that stores weights as ``dtype``: those of the files, else
    those of a new model.

    Raises:
        ConfigError: neither the model nor a file has the value of a constant.
        StateError: a file is damaged.
    """
    values = skeleton.constants()
    if not values:
        return {}
    dtypes = loaded_dtypes(hf_config, TORCH_DTYPES[dtype])
    constants: dict[str, torch.Tensor] = {}
    for name, (value, is_set) in values.items():
        read = None if weights is None else weights.read_constant(name, tuple(value.shape))
        if read is None and not is_set:
            raise ConfigError(
                f"model: type {hf_config.model_type!r} does not say how to fill its buffer {name};"
                " give its weights with model.path"
            )
        constants[name] = (value if read is None else read).to(dtypes[name]).contiguous()
    return constants


def narrowed(hf_config: PretrainedConfig, table: BlockTable) -> list[str]:
    """Returns the names of tensors that transformers keeps in fp32 and a run's workers have in a
    narrower type: a block has one type.
    """
    if table.weight_dtype is DType.FP32:
        return []
    dtypes = loaded_dtypes(hf_config, TORCH_DTYPES[table.weight_dtype])
    names = (tensor.name for block in table.blocks for tensor in block.tensors)
    return [name for name in names if dtypes.get(name) is torch.float32]  # adapters have none


def make_constants(
    run_dir: Path,
    hf_config: PretrainedConfig,
    skeleton: Skeleton,
    table: BlockTable,
    weights: Weights | None,
    say: Callable[[str], None],
) -> None:
    """Writes the constants of a run, those of ``weights`` if any. A model without constants has no
    file, and a run that may have trained keeps its file. Reports parameters that become narrower
    than in transformers.

    Raises:
        ConfigError, StateError: see :func:`initial_constants`.
    """
    path = run_dir / CONSTANTS
    if not (RunDirectory(run_dir).has_started and path.is_file()):
        if constants := initial_constants(hf_config, skeleton, table.weight_dtype, weights):
            write_atomically(path, save(constants, metadata={"format": "pt"}))
        else:
            path.unlink(missing_ok=True)
    if names := narrowed(hf_config, table):
        say(
            f"model: transformers keeps {few(folded(names))} in fp32; workers compute with"
            f" {table.weight_dtype.value}, masters and exports have fp32"
        )


def read_constants(run_dir: Path) -> dict[str, torch.Tensor]:
    """Returns the constants of a run; none where its model has none.

    Raises:
        StateError: the file is damaged, or was edited.
    """
    try:
        return load(read_checked(run_dir, CONSTANTS))
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as error:
        path = run_dir / CONSTANTS
        raise StateError(f"{path}: {error}; restore it as Penstock wrote it") from error
