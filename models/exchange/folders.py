"""Readers of folders without another trainer's optimizer.

A folder of a Hugging Face model is of kind ``hf``, a folder of PEFT's adapter of kind ``peft``. A
run directory or a saved state of Penstock is of kind ``penstock``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from penstock.config.adapter import AdapterConfig
from penstock.config.optimizers import OPTIMIZERS
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.models.adapters.files import SETTINGS
from penstock.models.adapters.files import WEIGHTS as ADAPTER_WEIGHTS
from penstock.models.checkpoints.adapters import plain_name
from penstock.models.checkpoints.checkpoint import FLOATS, Checkpoint
from penstock.models.checkpoints.conversion import Weights
from penstock.models.checkpoints.files import chosen_files, few
from penstock.models.checkpoints.mapped import TYPES
from penstock.models.exchange.foreign import (
    MASTER,
    WEIGHT,
    ForeignGroup,
    ForeignState,
    ForeignTensor,
)
from penstock.models.exchange.pickled_weights import PICKLED, PickledWeights, pickled_files
from penstock.models.surgery.composite import Composite, text_part
from penstock.models.surgery.hf import folder_composite, read_hf_config
from penstock.models.surgery.skeleton import Skeleton, build_skeleton
from penstock.protocol.run.checksums import check_object
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import BASE, base_folder, base_paths

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-\d{8,}")
_FROZEN = "frozen"
_ARRAYS = frozenset(name for row in OPTIMIZERS.values() for name in row.state_arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The weights in a folder, under the names of transformers' model. ``skeleton`` None: the
    folder has no config.json. ``composite``: the whole model, if the text model is a part of it.
    """

    tensors: tuple[ForeignTensor, ...]
    skeleton: Skeleton | None = None
    composite: Composite | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any] | None:
        """The model's settings, completed by transformers."""
        if self.skeleton is None:
            return None
        settings: dict[str, Any] = self.skeleton.model.config.to_dict()
        return settings


class ModelFolder:
    """Reads the weights of a Hugging Face model."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has weights of transformers."""
        return path.is_dir() and (
            any(path.glob("*.safetensors")) or any(map(is_file, (path / each for each in PICKLED)))
        )

    def open(self, path: Path) -> ForeignState:
        """Lists the weights from headers. Numbers are read only of a tensor that the files have
        twice.

        Raises:
            ConfigError, StateError: the weights or config.json cannot be used; names the file.
        """
        weights = model_weights(path)
        return ForeignState(
            kind="hf",
            path=path,
            tensors=weights.tensors,
            model_settings=weights.settings,
            problems=weights.problems,
            notes=weights.notes,
        )


class AdapterFolder:
    """Reads the weights of an adapter that PEFT saved."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has PEFT's settings and weights."""
        return is_file(path / SETTINGS) and is_file(path / ADAPTER_WEIGHTS)

    def open(self, path: Path) -> ForeignState:
        """Lists the adapter's weights from headers.

        Raises:
            StateError: the file is damaged.
        """
        return ForeignState(
            kind="peft",
            path=path,
            tensors=adapter_weights(path),
            fit=lambda skeleton, _: fitted_adapter(self.open(path), path, skeleton),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """Contents of a manifest that an import uses. ``files`` and ``base``: SHA-256 by name."""

    step: int
    samples_seen: int
    files: Mapping[str, str]
    base: Mapping[str, str]


class _SavedFiles(Checkpoint):
    """Files of a saved state. The first tensor of a file compares the file with the manifest."""

    def __init__(self, directory: Path, checksums: Mapping[str, str]) -> None:
        self._unverified = dict(checksums)
        super().__init__(directory, list(checksums))

    def _raw(self, name: str, file_name: str) -> torch.Tensor:
        if file_name in self._unverified:
            path = self._directory / file_name
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self._unverified.pop(file_name):
                raise StateError(
                    f"{path}: is damaged: its checksum differs from the manifest; give another"
                    " saved state of the run"
                )
        return super()._raw(name, file_name)


class SavedState:
    """Reads a saved state of Penstock, or the newest one of a run directory."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder is a run directory or a saved state."""
        return is_file(path / "run.json") or (
            is_file(path / _MANIFEST) and is_file(path / "block-0000.safetensors")
        )

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors from headers.

        Raises:
            ConfigError: the run has no saved state.
            StateError: a file is missing or damaged.
        """
        state = _newest(path) if is_file(path / "run.json") else path
        manifest = _read_manifest(state / _MANIFEST)
        parts = [(_SavedFiles(state, manifest.files), "")]
        if bases := {each.name for each in base_paths(state).values()}:
            folder = base_folder(state)
            checksums = {name: manifest.base[name] for name in sorted(bases)}
            parts.append((_SavedFiles(folder, checksums), f"../{folder.name}/"))
        return ForeignState(
            kind="penstock",
            path=state,
            tensors=tuple(
                _of_state(checkpoint, key, at)
                for checkpoint, at in parts
                for key in checkpoint.headers
            ),
            step=manifest.step,
            samples_seen=manifest.samples_seen,
            groups=_groups(state),
        )


def model_weights(path: Path) -> ModelWeights:
    """Returns the weights in a folder of transformers.

    A problem says if config.json is of no model that can be trained; then the names are those of
    the files.

    Raises:
        ConfigError: there are no weights in safetensors.
        StateError: a file is missing or damaged.
    """
    if not is_file(path / "config.json"):
        return _without_config(path)
    try:
        return _of_model(path)
    except ConfigError as error:
        weights = _without_config(path)
        return replace(weights, problems=(*weights.problems, str(error)), notes=())


def _of_model(path: Path) -> ModelWeights:
    with _naming(path):
        hf_config = read_hf_config(path)
        hf_config = text_part(hf_config) or hf_config
        checkpoint = _weight_files(path, hf_config)
        skeleton, composite = build_skeleton(hf_config), folder_composite(path)
        weights, notes = Weights(skeleton, checkpoint, composite), []
        if weights.untied():
            hf_config.tie_word_embeddings = False
            skeleton = build_skeleton(hf_config)
            weights = Weights(skeleton, checkpoint, composite)
            weights.untied()
            notes.append("tied tensors differ in the files, so they are not tied")
    if composite is not None:
        notes.append(
            f"{len(weights.left_out):,} tensors of other parts than the text model"
            f" ({hf_config.model_type}) are left out"
        )
    tensors = [
        _foreign(checkpoint, name, shape, sources, WEIGHT, partial(weights.load, name))
        for name, shape, sources in weights.described()
    ]
    tensors += [_as_named(checkpoint, name) for name in weights.unused]
    return ModelWeights(
        tensors=tuple(tensors),
        skeleton=skeleton,
        composite=composite,
        problems=(*_of_other_class(path, hf_config, skeleton, composite), *_quantized(checkpoint)),
        notes=tuple(notes),
    )


def adapter_weights(path: Path) -> tuple[ForeignTensor, ...]:
    """Returns the tensors of PEFT's file under the names that a run gives them.

    Raises:
        StateError: the file is missing or damaged.
    """
    checkpoint = Checkpoint(path, [ADAPTER_WEIGHTS])
    return tuple(_as_named(checkpoint, name, plain_name(name)) for name in checkpoint.headers)


def fitted_adapter(state: ForeignState, path: Path, skeleton: Skeleton) -> ForeignState:
    """Returns the state of an adapter with a problem if the run's adapter is not the one of
    ``path``, the folder with PEFT's settings.

    Raises:
        ConfigError: the settings are those of another adapter than a plain LoRA.
    """
    remedy = f"set adapter.path: {path.absolute()}"
    if skeleton.adapter is None:
        problem = f"{path}: is an adapter, and the configuration has no section adapter; {remedy}"
        return replace(state, problems=(*state.problems, problem))
    theirs = build_skeleton(skeleton.model.config, AdapterConfig(path=path)).adapter
    assert theirs is not None
    run = {**skeleton.adapter.modules, **dict.fromkeys(skeleton.adapter.saved)}
    checkpoint = {**theirs.modules, **dict.fromkeys(theirs.saved)}
    differing = [
        name for name in {**checkpoint, **run} if run.get(name, 0) != checkpoint.get(name, 0)
    ]
    if not differing:
        return state
    problem = (
        f"{path / SETTINGS}: the adapter differs from the configuration's in {few(differing)}"
        f" (modules, r, alpha or modules_to_save); {remedy}"
    )
    return replace(state, problems=(*state.problems, problem))


def _without_config(path: Path) -> ModelWeights:
    with _naming(path):
        checkpoint = _weight_files(path, None)
    return ModelWeights(
        tensors=tuple(_as_named(checkpoint, name) for name in checkpoint.headers),
        problems=tuple(_quantized(checkpoint)),
        notes=(f"{path}: has no config.json, so the names are those of the files",),
    )


def _weight_files(path: Path, hf_config: PretrainedConfig | None) -> Checkpoint:
    """Returns the weights that transformers takes; older ones are pickles."""
    checkpoint: Checkpoint
    pickled = next((name for name in PICKLED if is_file(path / name)), None)
    if pickled is None or any(path.glob("model*.safetensors*")):
        checkpoint = Checkpoint(path, chosen_files(path, hf_config))
    else:
        checkpoint = PickledWeights(path, pickled_files(path, pickled))
    checkpoint.check_repeated()
    return checkpoint


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names the folder in errors that name the key ``model.path``."""
    try:
        yield
    except (ConfigError, StateError) as error:
        text = str(error).replace(f"model.path = {str(path)!r}", str(path))
        raise type(error)(text.replace("model.path", str(path))) from error


def _of_other_class(
    path: Path, hf_config: PretrainedConfig, skeleton: Skeleton, composite: Composite | None
) -> Iterator[str]:
    """Yields a problem if config.json names another class of model than the language model."""
    model = skeleton.model if composite is None else composite.model
    names = getattr(hf_config, "architectures", None) or []
    if composite is None and names and type(model).__name__ not in names:
        yield (
            f"{path / 'config.json'}: architectures is {few(names)}, and Penstock trains"
            f" {type(model).__name__}; save the language model alone"
        )


def _quantized(checkpoint: Checkpoint) -> Iterator[str]:
    names = [name for name, header in checkpoint.headers.items() if header.dtype not in FLOATS]
    weights = [name for name in names if checkpoint.headers[name].shape]
    for name in weights[:1]:
        header = checkpoint.headers[name]
        yield (
            f"{header.file_name}: {len(weights)} tensors such as {name} are quantized or integers"
            f" ({header.dtype}); give weights in fp32, fp16 or bf16"
        )


def _foreign(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    sources: Iterable[str],
    role: str,
    load: Callable[[], torch.Tensor],
    at: str = "",
) -> ForeignTensor:
    """Returns a tensor that is made of ``sources``; ``at`` is the place of the files' folder."""
    header = checkpoint.headers[next(iter(sources))]
    dtype = TYPES.get(header.dtype)
    count = math.prod(shape)
    return ForeignTensor(
        name=name,
        role=role,
        dtype=header.dtype if dtype is None else str(dtype).removeprefix("torch."),
        shape=shape,
        num_elements=count,
        num_bytes=count * (1 if dtype is None else dtype.itemsize),
        file=at + header.file_name,
        load=load,
    )


def _as_named(checkpoint: Checkpoint, key: str, name: str | None = None) -> ForeignTensor:
    shape = checkpoint.headers[key].shape
    return _foreign(checkpoint, name or key, shape, [key], WEIGHT, lambda: checkpoint.view(key))


def _of_state(checkpoint: Checkpoint, key: str, at: str) -> ForeignTensor:
    start, _, rest = key.partition(".")
    role, name = MASTER, key
    if start == _FROZEN or start in _ARRAYS:
        role, name = WEIGHT if start == _FROZEN else start, rest
    shape = checkpoint.headers[key].shape
    return _foreign(checkpoint, name, shape, [key], role, lambda: checkpoint.view(key), at)


def _newest(run: Path) -> Path:
    folder = run / "state"
    states = [each for each in folder.glob("step-*") if _STEP.fullmatch(each.name)]
    if not states:
        raise ConfigError(
            f"{run}: the run has no saved state; set train.save_every, or stop the run, which saves"
        )
    return max(states, key=lambda each: int(each.name.removeprefix("step-")))


def _read_manifest(path: Path) -> _Manifest:
    try:
        fields: dict[str, Any] = parse_json(path.read_bytes())
        check_object(fields, str(path))
        files, base = (
            {str(name): str(entry["sha256"]) for name, entry in listed.items()}
            for listed in (fields["files"], fields.get(BASE, {}))
        )
        return _Manifest(
            step=int(fields["version"]),
            samples_seen=int(fields["scheduler"]["data_position"]),
            files=files,
            base=base,
        )
    except (OSError, *DAMAGED) as error:
        raise StateError(f"{path}: the manifest is damaged: {error!r}") from error


def _groups(state: Path) -> tuple[ForeignGroup, ...]:
    """Returns the settings of a saved state's run, if the state lies in a run directory."""
    run = RunDirectory(state.absolute().parent.parent)
    if not is_file(run.path / "resolved.yaml") or not is_file(run.path / "table.json"):
        return ()
    optimizer = run.config.optimizer
    return (ForeignGroup(names=(), betas=optimizer.betas, eps=optimizer.eps),)
