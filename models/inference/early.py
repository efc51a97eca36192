"""``python -m penstock.models.inference.early RUN_DIR``: checks that need no torch.

The checks run while torch is imported elsewhere.

The checks are about paths, the type of the model, the chat template, and the columns of the first
record of each source. They refuse with the words of :mod:`penstock.models.prepare`, which checks
again, and checks all else.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.config.values import RECORD_OBJECTIVES, WEIGHTED
from penstock.host.files import DAMAGED, parse_json
from penstock.models.adapters.files import check_adapter_folder
from penstock.models.checkpoints.causes import check_folder
from penstock.models.data.chat.conversation import pair_of, request_of
from penstock.models.data.chat.templates import named_template
from penstock.models.data.chat.weights import WEIGHT, WEIGHTS
from penstock.models.data.reading.record import text_of
from penstock.models.data.rows.evaluation import SetNaming, with_training_data
from penstock.models.data.rows.origins import Origin, origins_of
from penstock.models.data.rows.sources import makes_rows
from penstock.models.data.sources import STDLIB
from penstock.models.surgery.types import unknown_type, unknown_type_of_folder
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory

_TYPES = ("auto_mappings.py", "configuration_auto.py")
"""Files of transformers with the names of all model types."""

_NAME = re.compile(r'"([\w.-]+)"')
_ENTRY = re.compile(r'"([\w.-]+)"(?:, |: )"\w+Config"')


def check_inputs(config: Config) -> None:
    """Refuses inputs of a run as far as that needs no torch.

    Raises:
        ConfigError: a path does not exist, transformers has no such type, or the first record of a
            source has no columns that training reads.
    """
    if not config.cluster.platform.builtin_model:
        if config.model.path is not None:
            check_folder(config.model.path)
        _check_type(config)
    if config.adapter is not None and config.adapter.path is not None:
        check_adapter_folder(config.adapter.path)
    named_template(config.data.chat_template)
    _check_data(config)
    for each in config.eval.sets:
        if each.source is not None and each.has_files:
            with SetNaming(each.name):
                _check_data(with_training_data(config, each.source))


def _check_type(config: Config) -> None:
    """Refuses a type that transformers does not have. Types that ``model.imports`` may register are
    left to the preparation.
    """
    folder, fields = config.model.path, config.model.hf
    if config.model.imports:
        return
    settings: Any = fields
    if folder is not None:
        with suppress(OSError, *DAMAGED):
            settings = parse_json((folder / "config.json").read_bytes())
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    text = _text_of_types()
    if not isinstance(kind, str) or text is None or kind in _NAME.findall(text):
        return
    if folder is not None:
        raise unknown_type_of_folder(folder / "config.json", kind)
    raise unknown_type(kind, difflib.get_close_matches(kind, _ENTRY.findall(text), n=3))


def _text_of_types() -> str | None:
    """Returns the text that names all types; None if transformers has it elsewhere. An import of
    transformers' list of types would import torch.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "models" / "auto"
    texts = [path.read_text(encoding="utf-8") for n in _TYPES if (path := folder / n).is_file()]
    text = "".join(texts)
    return text if '"llama"' in text else None


def _check_data(config: Config) -> None:
    data = config.data
    if data.tokens is not None or data.path == STDLIB or config.cluster.platform.builtin_model:
        return
    rows = data.objective in RECORD_OBJECTIVES or makes_rows(config)
    for origin in origins_of(config, "path", lambda line: None):
        _check_first(config, origin, rows=rows)


def _check_first(config: Config, origin: Origin, *, rows: bool) -> None:
    """Refuses a source if its first record has other columns than training reads."""
    record = next((record for _, record in origin.records()), None)
    if record is None or not record.where or config.data.bad_records != "refuse":
        return
    if not rows:
        text_of(record)
        return
    read = pair_of if config.trains_on_pairs else request_of
    also = (WEIGHT, WEIGHTS) if config.data.objective == WEIGHTED else ()
    read(record.place, record.fields, origin.form, also)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the inputs of a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.inference.early", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory with resolved.yaml")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        check_inputs(RunDirectory(options.run_dir).config)

    return tool_main(work, options.run_dir, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
