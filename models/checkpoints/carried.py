"""The files that an export carries in addition to weights and configuration. No torch.

These are the whole tokenizer, the chat template that ``data.chat_template`` names, and the model's
settings for generation. They are copied into the run directory when the data are made. So they
match the run's tokens, even if the source folder changes later.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from penstock.config.schema import Config
from penstock.host.errors import StateError
from penstock.models.data.chat.templates import MODEL, named_template
from penstock.models.data.tokenizer import Tokenizer, open_tokenizer
from penstock.models.data.tokenizer_folder import tokenizer_files
from penstock.protocol.run.rundir import RunDirectory

_FOLDER = "tokenizer"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"


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
        files[TEMPLATE] = template.encode()
    temporary, folder = run_dir / f".{_FOLDER}.tmp", carried_folder(run_dir)
    for old in (temporary, folder):
        if old.exists():
            shutil.rmtree(old)
    temporary.mkdir()
    write_files(temporary, files)
    temporary.rename(folder)


def read_carried(config: Config, run_dir: Path) -> dict[str, bytes]:
    """Returns the files that an export carries: path below the exported directory -> content.

    Raises:
        StateError: a file cannot be read.
        ConfigError: the run has no copy, and its tokenizer has moved.
    """
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
