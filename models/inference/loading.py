"""The model of a run's saved state or of a Hugging Face folder, loaded by transformers.

A saved state becomes the tensors of an export in memory. The export's small files (configuration,
tokenizer, settings for generation) go to a scratch folder, where transformers reads them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from penstock.config.data import DataConfig
from penstock.config.schema import Config, load_config, parse_config
from penstock.config.values import BYTE, ROW_OBJECTIVES
from penstock.host.errors import ConfigError, StateError
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.carried import GENERATION, TEMPLATE, carried_folder
from penstock.models.checkpoints.export import export_in_memory
from penstock.models.checkpoints.files import few
from penstock.models.data.chat.templates import CHATML, MODEL
from penstock.models.data.tokenizer_folder import has_tokenizer
from penstock.models.inference.lines import note
from penstock.models.surgery.composite import text_part
from penstock.models.surgery.hf import import_modules, read_hf_config
from penstock.models.surgery.probe import refused
from penstock.models.surgery.skeleton import predicts_masked
from penstock.models.torch_device import first_with_room
from penstock.protocol.run.rundir import RunDirectory

_ROOM = 1.5
"""Free memory of a GPU that a model takes, as a multiple of the model's own bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """A saved state ``state`` of the run in ``folder``, or a Hugging Face folder without one.

    ``config`` is that of the run, or one for the folder.
    """

    config: Config
    folder: Path
    state: Path | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> ModelPlace:
        """Returns the place that the options of a command name.

        Raises:
            ConfigError: the model predicts masked tokens, or a file cannot be used.
        """
        folder: Path = options.place
        if options.state is not None:
            config = _with_kept_files(RunDirectory(folder).config, folder)
        elif options.config is None:
            config = _defaults(folder)
        else:
            config = load_config(options.config)
            model = config.model.model_copy(update={"path": folder, "hf": None})
            config = config.model_copy(update={"model": model})
        place = cls(config=config, folder=folder, state=options.state)
        place._check_kind()
        return place

    def _check_kind(self) -> None:
        """Refuses a model that does not predict the next token."""
        import_modules(self.config)
        model_folder = self.folder if self.state is None else self.folder / "model"
        hf_config = read_hf_config(model_folder)
        hf_config = text_part(hf_config) or hf_config
        if predicts_masked(hf_config):
            raise ConfigError(
                f"{self.folder}: model_type = {hf_config.model_type!r} is an encoder, which"
                " predicts masked tokens and not the next one; give a decoder such as llama"
            )
        objective = self.config.data.objective
        if objective not in ROW_OBJECTIVES:
            raise ConfigError(
                f"{self.folder}: data.objective = {objective!r}; needs a run of"
                f" {' or '.join(ROW_OBJECTIVES)}"
            )


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a model."""
    parser.add_argument("place", type=Path, help="run directory or Hugging Face folder")
    parser.add_argument("scratch", type=Path, help="empty folder, which the caller removes")
    parser.add_argument("--state", type=Path, help="RUN_DIR/state/step-…, checked by the caller")
    parser.add_argument("--config", type=Path, help="configuration for a folder")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")


def load_model(place: ModelPlace, scratch: Path) -> Any:
    """Returns the model in evaluation mode, on the first GPU if it has room, else on the host.

    Raises:
        ConfigError: transformers cannot load the model, or the folder lacks tensors.
        StateError: the saved state lacks tensors.
    """
    quiet: Any = logging.disable_progress_bar  # annotated with no result
    quiet()
    if place.state is None:
        model = _of_folder(place.folder)
    else:
        model = _of_state(place.folder, place.state, scratch)
    num_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    device = first_with_room(_ROOM * num_bytes)
    note(f"the model has {num_bytes / 2**20:,.2f} MiB of weights, and computes on {device}")
    return model.to(device).eval()


def load_tokenizer(place: ModelPlace, scratch: Path) -> Any:
    """Returns transformers' tokenizer of the model. :func:`load_model` comes first.

    Raises:
        ConfigError: there is none, or transformers cannot open it.
    """
    folder = place.folder if place.state is None else scratch
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{place.folder}: has no tokenizer, so a prompt has no tokens; the model was trained on"
            " token numbers (data.tokens)"
        )
    load: Any = AutoTokenizer.from_pretrained
    with refused(lambda error: f"{folder}: transformers cannot open its tokenizer: {error}"):
        return load(folder, local_files_only=True, trust_remote_code=False)


def positions_of(model: Any) -> int | None:
    """Returns the number of positions of a model; None where nothing limits them."""
    text = model.config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _of_folder(folder: Path) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    with refused(lambda error: f"{folder}: transformers cannot load the model: {error}"):
        model, report = load(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype="auto",
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"{folder}: its files lack {len(missing)} tensors of the model: {few(missing, 3)};"
            " download them again, or export the model again"
        )
    return model


def _of_state(run_dir: Path, state: Path, scratch: Path) -> Any:
    exported = export_in_memory(run_dir, state, scratch)
    config = AutoConfig.from_pretrained(scratch)
    load: Any = cast(Any, exported.model_class).from_pretrained
    with refused(lambda error: f"{state}: transformers cannot load the model: {error}"):
        model, report = load(
            None,
            config=config,
            state_dict=exported.tensors,
            dtype=TORCH_DTYPES[exported.dtype],
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise StateError(f"{state}: lacks {len(missing)} tensors of the model: {few(missing, 3)}")
    if (scratch / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(scratch)
    return model


def _defaults(folder: Path) -> Config:
    """Returns a configuration of defaults, with rows of at most the model's positions."""
    hf_config = read_hf_config(folder).get_text_config(decoder=True)
    positions = getattr(hf_config, "max_position_embeddings", None)
    data: dict[str, Any] = {"path": "@stdlib"}
    if isinstance(positions, int) and 0 < positions < DataConfig(**data).sequence_length:
        data["sequence_length"] = positions
    return parse_config({"model": {"path": str(folder)}, "data": data})


def _with_kept_files(config: Config, run_dir: Path) -> Config:
    """Returns a run's configuration with the run's copies of a tokenizer and of a chat template
    that are no longer where the configuration names them.
    """
    kept, changes = carried_folder(run_dir), {}
    name, template = config.tokenizer, config.data.chat_template
    if name not in (None, BYTE) and not Path(name).exists() and kept.is_dir():
        changes["tokenizer"] = str(kept)
    if template not in (MODEL, CHATML) and not Path(template).exists():
        if (kept / TEMPLATE).is_file():
            changes["chat_template"] = str(kept / TEMPLATE)
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})
