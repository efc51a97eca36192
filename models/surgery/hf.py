"""Hugging Face configurations: from ``model.hf`` or ``model.path`` to a complete, checked one."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from penstock.config.adapter import AdapterConfig
from penstock.config.schema import Config
from penstock.config.values import MASKED, NEXT_TOKEN, ROW_OBJECTIVES
from penstock.host.errors import ConfigError, StateError, reason
from penstock.host.files import is_file, parse_json
from penstock.models.adapters.files import read_kept
from penstock.models.data.user_modules import import_hint, import_user_module
from penstock.models.surgery.composite import Composite, text_part
from penstock.models.surgery.probe import refused
from penstock.models.surgery.skeleton import predicts_masked
from penstock.models.surgery.types import SUPPORTED, unknown_type, unknown_type_of_folder
from penstock.protocol.run.checksums import check_checksum
from penstock.protocol.run.rundir import RunDirectory

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OLDER_NAMES = {"rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"}
"""Accepted by transformers although no configuration lists them any more."""

_WITHOUT_EFFECT = {"max_window_layers", "n_ctx", "prefix", "task_specific_params"}
"""Published configurations have them; transformers reads them for some types, or no longer."""

_WITHOUT_EFFECT_IF_OFF = {"activation_dropout", "use_sliding_window"}
"""Keys without effect while they are off. Switched on, a key asks for an effect."""

_CONFIG_READ = re.compile(
    r"""\bconfig\.(\w+)|getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']"""
    r"""|\bkwargs\.(?:pop|get|setdefault)\(\s*["'](\w+)["']"""
)

_COUNTS = re.compile(
    r"(^|_)(layers?|blocks|experts|heads|stages|groups|depths?)($|_per_)|^n_(layers?|heads?)$"
)
"""Keys of configurations with numbers of modules, or of parts of one."""
_MOST = 10_000
_DROPOUT = re.compile(r"dropout|pdrop")
"""Names of shares of dropout."""

_ADDED_LOSSES = {
    "output_router_logits": "a loss over the routers of all layers",
    "z_loss_coefficient": "a loss over the size of the logits",
}
"""Keys that add to a type's loss during training, and the added loss."""


def resolve_hf_config(
    config: Config, *, tokenizer_vocab_size: int | None, eos: int | None
) -> PretrainedConfig:
    """Returns the model's configuration with vocabulary size and special tokens filled in.

    ``tokenizer_vocab_size`` is None when token ids come from a file; then the model must name the
    size. A tokenizer may have ids that the model lacks: only ids in texts count. ``eos`` is the
    token that ends a document, None if it is unknown.

    Raises:
        ConfigError: unknown type or key, impossible value, or a vocabulary without ``eos``.
    """
    import_modules(config)
    if config.model.path is not None:
        hf_config = read_hf_config(config.model.path)
        vocab_key = f"vocab_size of {config.model.path / 'config.json'}"
        hf_config = text_part(hf_config) or hf_config
        _check_kind(hf_config, f"model_type of {config.model.path / 'config.json'}")
        remedy = "give the tokenizer that the model was trained with (data.tokenizer)"
    else:
        assert config.model.hf is not None
        hf_config = _from_mapping(dict(config.model.hf), tokenizer_vocab_size, eos)
        vocab_key, remedy = "model.hf.vocab_size", f"give at least {tokenizer_vocab_size}"
    vocab_size = int(hf_config.vocab_size)
    if tokenizer_vocab_size is not None and eos is not None and vocab_size <= eos:
        raise ConfigError(
            f"{vocab_key} = {vocab_size}: tokenizer {config.tokenizer!r} ends documents with id"
            f" {eos}; {remedy}"
        )
    _check_objective(hf_config, config.data.objective)
    _check_loss(hf_config)
    return hf_config


def folder_composite(directory: Path) -> Composite | None:
    """Returns the whole model of a folder with a text model to train; None for other models.

    Raises:
        ConfigError: it cannot be built, or ``config.json`` cannot be used.
        StateError: ``config.json`` is no regular file.
    """
    return Composite.of(read_hf_config(directory), directory)


def import_modules(config: Config) -> None:
    """Imports the modules of ``model.imports``, so that transformers knows the model types that
    they register.

    Raises:
        ConfigError: one cannot be imported.
    """
    for name in config.model.imports:
        with refused(
            lambda error, name=name: (  # type: ignore[misc]
                f"model.imports: {name!r}: {reason(error)}; {import_hint(config)}"
            )
        ):
            import_user_module(name, config)


def read_hf_config(directory: Path) -> PretrainedConfig:
    """Returns the configuration in ``config.json`` of a local model directory.

    Raises:
        ConfigError: the file is missing, or is no configuration that transformers knows.
        StateError: ``config.json`` is no regular file.
    """
    path = directory / "config.json"
    if not is_file(path):
        raise ConfigError(
            f"model.path = {str(directory)!r}: has no config.json; give a local directory in the"
            " Hugging Face layout"
        )
    try:
        fields = parse_json(path.read_bytes())
        model_type = fields.get("model_type") if isinstance(fields, dict) else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {reason(error)}") from error
    if isinstance(fields, dict):
        _check_counts(fields, lambda key: f"{key} of {path}")
    # Otherwise transformers would ask on the terminal whether to run code of the folder.
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if model_type is not None and not known:
        raise unknown_type_of_folder(path, model_type)
    with refused(lambda error: f"{path}: {reason(_innermost(error))}"):
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return hf_config


def load_run_config(run_dir: Path) -> PretrainedConfig:
    """Returns the configuration in ``RUN_DIR/model/config.json``, which ``penstock.models.prepare``
    wrote.

    Raises:
        StateError: it is missing, damaged, or has changed since the start of the run.
    """
    name = "model/config.json"
    import_modules(RunDirectory(run_dir).config)
    try:
        check_checksum(run_dir, name, (run_dir / name).read_bytes())
    except OSError as error:
        raise StateError(f"{run_dir / name}: cannot read it: {error}; start again") from error
    try:
        return read_hf_config(run_dir / "model")
    except ConfigError as error:
        raise StateError(f"{error} (written by penstock.models.prepare; start again)") from error


def load_run_adapter(run_dir: Path) -> AdapterConfig | None:
    """Returns the settings of a run's adapters; None: the run trains the model itself.

    Raises:
        ConfigError: the run has no configuration.
        StateError: the kept settings of ``adapter.path`` are missing or damaged.
    """
    given = RunDirectory(run_dir).config.adapter
    if given is None or given.path is None:
        return given
    return read_kept(run_dir, given.dropout)


def without_dropout(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of a configuration in which each share of dropout is 0."""
    changed = copy.deepcopy(hf_config)
    for part in (changed, changed.get_text_config(decoder=True)):
        for key, value in vars(part).items():
            if _DROPOUT.search(key) and isinstance(value, float):
                setattr(part, key, 0.0)
    return changed


def _from_mapping(
    fields: dict[str, Any], tokenizer_vocab_size: int | None, eos: int | None
) -> PretrainedConfig:
    _check_counts(fields, lambda key: f"model.hf.{key}")
    model_type = str(fields.pop("model_type"))
    named = f"model.hf.model_type = {model_type!r}"
    if model_type not in CONFIG_MAPPING:
        raise unknown_type(model_type, difflib.get_close_matches(model_type, CONFIG_MAPPING, n=3))
    alone = "transformers has no configuration of this type without others to go with it"
    with refused(lambda error: f"{named}: {alone}: {reason(_innermost(error))}"):
        config_class = CONFIG_MAPPING[model_type]
        _check_kind(config_class(), "model.hf.model_type")
    _refuse_unknown(fields, config_class)
    if "vocab_size" not in fields:
        if tokenizer_vocab_size is None:
            raise ConfigError(
                "model.hf.vocab_size: is missing; a run from data.tokens needs the size of"
                " the vocabulary"
            )
        fields["vocab_size"] = tokenizer_vocab_size
    # A type's default special tokens belong to the tokenizer of its first model: as ordinary tokens
    # of another tokenizer they would be treated as padding.
    defaults = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}

    def explain(error: Exception) -> str:
        needed = [key for key in defaults if key not in fields and f"'{key}'" in str(error)]
        hint = f"; give model.hf.{needed[0]}, a token that the text does not have" if needed else ""
        return f"model.hf: not a {model_type} configuration: {reason(_innermost(error))}{hint}"

    with refused(explain):
        return config_class(**{**defaults, **fields})


def _check_counts(fields: dict[str, Any], where: Callable[[str], str]) -> None:
    """Refuses numbers of modules that would take all memory before anything else can be checked."""
    parts = {f"{key}.": part for key, part in fields.items() if isinstance(part, dict)}
    for prefix, part in {"": fields, **parts}.items():
        for key, value in part.items():
            if isinstance(value, (int, float)) and value > _MOST and _COUNTS.search(str(key)):
                number = str(value)
                number = number if len(number) <= 20 else f"{number[:20]}…"
                raise ConfigError(f"{where(prefix + key)} = {number}: is more than {_MOST:,}")


def _innermost(error: Exception) -> Exception:
    """Returns the error that transformers' checks wrap in the names of validators and
    exceptions.
    """
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):
        return _innermost(error.__cause__)
    return error


def _check_kind(hf_config: PretrainedConfig, where: str) -> None:
    """Refuses models that are no language model, or contain one among other parts."""
    model_type = hf_config.model_type
    named = f"{where} = {model_type!r}"
    if not _is_language_model(hf_config) or getattr(hf_config, "is_encoder_decoder", False):
        raise ConfigError(f"{named}: transformers has no language model of it; {SUPPORTED}")
    inner = hf_config.get_text_config(decoder=True)
    if inner.model_type != model_type or not isinstance(
        getattr(hf_config, "vocab_size", None), int
    ):
        alone = _is_language_model(inner)
        remedy = f"give {inner.model_type!r} by itself" if alone else SUPPORTED
        raise ConfigError(f"{named}: its language model is one part of several; {remedy}")


def _is_language_model(hf_config: PretrainedConfig) -> bool:
    known = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING)
    return any(type(hf_config) in mapping for mapping in known)


def _refuse_unknown(fields: dict[str, Any], config_class: type[PretrainedConfig]) -> None:
    """Refuses keys that a model type does not use. transformers keeps them silently, and another
    model than intended is trained.
    """
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class().to_dict())
    known |= {*config_class.attribute_map, *_SPECIAL_TOKENS, *_OLDER_NAMES}
    known -= {"self", "kwargs", "args"}
    known |= _WITHOUT_EFFECT | {key for key in _WITHOUT_EFFECT_IF_OFF if not fields.get(key)}
    for key in fields:
        if key not in known and key not in _read_by_type(config_class):
            close = difflib.get_close_matches(key, sorted(known), n=3) or sorted(known)
            raise ConfigError(f"model.hf.{key}: unknown key; known keys are {', '.join(close)}")


def _read_by_type(config_class: type[PretrainedConfig]) -> set[str]:
    """Returns keys that the modules of a type or its configuration read, declared by the class or
    not. They include keys of published configurations (``head_dim`` of qwen3_moe, ``rotary_pct`` of
    gpt_neox).
    """
    folder = Path(inspect.getfile(config_class)).parent
    files = (*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py"))
    sources = (path.read_text(encoding="utf-8") for path in files)
    matches = (match for text in sources for match in _CONFIG_READ.findall(text))
    return {name for match in matches for name in match if name}


def _check_loss(hf_config: PretrainedConfig) -> None:
    """Refuses an auxiliary loss: only the loss of the tokens is trained on."""
    for key, added in _ADDED_LOSSES.items():
        value = getattr(hf_config, key, None)
        if value:
            raise ConfigError(
                f"model: {key} = {json.dumps(value)} of {hf_config.model_type!r} adds {added} to"
                " the tokens' loss, and Penstock trains on the tokens' loss alone;"
                f" set {key} to {json.dumps(type(value)())}"
            )


def _check_objective(hf_config: PretrainedConfig, objective: str) -> None:
    """Refuses a model that sees the tokens to predict, or does not see the tokens after a mask."""
    masked = predicts_masked(hf_config)
    if masked and objective in ROW_OBJECTIVES:
        raise ConfigError(
            f"data.objective = {objective!r}: {hf_config.model_type!r} is an encoder, which sees"
            f" the words that it would have to predict; set data.objective: {MASKED}"
        )
    if not masked and objective == MASKED:
        raise ConfigError(
            f"data.objective = {objective!r}: {hf_config.model_type!r} is a decoder, which sees no"
            f" words after a masked one; set data.objective: {NEXT_TOKEN}"
        )
