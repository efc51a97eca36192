"""The files that an export carries in addition to weights and configuration. No torch.

These are the whole tokenizer, the chat template that ``data.chat_template`` names, and the model's
settings for generation. They are copied into the run directory when the data are made. So they
match the run's tokens, even if the source folder changes later.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from penstock.config.schema import Config
from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, parse_json
from penstock.models.data.chat.published.defaults import with_defaults
from penstock.models.data.chat.templates import MODEL, named_template
from penstock.models.data.tokenizer import Tokenizer, open_tokenizer
from penstock.models.data.tokenizer_folder import tokenizer_files
from penstock.protocol.run.rundir import RunDirectory

_FOLDER = "tokenizer"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
_SETTINGS, _DEFAULT = "tokenizer_config.json", "default"
_ADDITIONAL = "additional_chat_templates/"
"""Folder of a tokenizer's other templates, such as the one for records with tools."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def carried_folder(run_dir: Path) -> Path:
    """Returns the folder of a run's copies, which older runs lack."""
    return run_dir / _FOLDER


def keep_carried(config: Config, run_dir: Path, tokenizer: Tokenizer | None) -> None:
    """Writes ``RUN_DIR/tokenizer``; the folder appears whole or not at all.

    ``tokenizer`` is that of the run's text; a token file is assumed to use the model's tokenizer. A
    run that has started keeps the template that it was prepared with.

    Raises:
        ConfigError: a file of the tokenizer or the chat template cannot be read.
    """
    model_folder = config.model.path
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        files = tokenizer.files()
    elif model_folder is not None:
        files = tokenizer_files(model_folder)
    # The settings name tokens by their ids, which mean other tokens in another tokenizer.
    if model_folder is not None and config.tokenizer in (None, str(model_folder)):
        generation = model_folder / GENERATION
        if generation.is_file():
            files[GENERATION] = generation.read_bytes()
    kept = carried_folder(run_dir) / TEMPLATE
    if config.data.chat_template != MODEL and RunDirectory(run_dir).has_started and kept.is_file():
        files[TEMPLATE] = kept.read_bytes()
    elif (template := named_template(config.data.chat_template)) is not None:
        # Another template of the tokenizer would render records with tools in another way.
        files = {name: text for name, text in files.items() if not name.startswith(_ADDITIONAL)}
        files[TEMPLATE] = template.encode()
    temporary, folder = run_dir / f".{_FOLDER}.tmp", carried_folder(run_dir)
    for old in (temporary, folder):
        if old.exists():
            shutil.rmtree(old)
    temporary.mkdir()
    write_files(temporary, files)
    temporary.rename(folder)


def read_carried(config: Config, run_dir: Path) -> dict[str, bytes]:
    """Returns the files that an export carries: path below the exported directory -> content. The
    chat template has the values of ``data.chat_template_kwargs`` as defaults.

    Raises:
        StateError: a file cannot be read.
        ConfigError: the run has no copy, and its tokenizer has moved.
    """
    files = _carried(config, run_dir)
    variables = config.data.chat_template_kwargs
    templates = _templates(files) if variables else {}
    for name, text in templates.items():
        path = TEMPLATE if name == _DEFAULT else f"{_ADDITIONAL}{name}.jinja"
        files[path] = with_defaults(text, variables).encode()
    return files


def _templates(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the chat templates of a tokenizer's files by name, where transformers reads them: in
    a file of their own, else in the settings.
    """
    if TEMPLATE in files:
        others = {
            Path(name).stem: text.decode()
            for name, text in files.items()
            if name.startswith(_ADDITIONAL)
        }
        return {**others, _DEFAULT: files[TEMPLATE].decode()}
    try:
        value = parse_json(files.get(_SETTINGS, b"{}")).get("chat_template")
    except (*DAMAGED, AttributeError):
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    entries = (
        [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    )
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {
        name: text
        for name, text in pairs
        # The name becomes that of a file.
        if isinstance(text, str) and isinstance(name, str) and _NAME.fullmatch(name)
    }


def _carried(config: Config, run_dir: Path) -> dict[str, bytes]:
    folder = carried_folder(run_dir)
    if not folder.is_dir():
        # Runs that were prepared before there were copies.
        tokenizer = open_tokenizer(config)
        return {} if tokenizer is None else tokenizer.files()
    try:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    except OSError as error:
        raise StateError(f"{error.filename}: cannot read it: {error.strerror}") from error


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes files below a directory; their contents are on disk when this returns."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
