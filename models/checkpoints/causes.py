"""Causes of unusable model folders, checked before their first symptoms.

No torch: the checks come before anything is opened.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from penstock.config.hub_names import from_hub
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED, parse_json
from penstock.host.inputs import is_pointer

_READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DataParallel or DistributedDataParallel",
    "_fsdp_wrapped_module.": "FSDP",
    "base_model.model.": "peft",
}
"""Prefixes of names, and the wrapper that puts them there."""


def check_model_folder(path: Path) -> None:
    """Refuses a path that is no model folder, and files that are only pointers to files.

    Raises:
        ConfigError: names the path and the remedy.
    """
    check_folder(path)
    names = sorted({file.name for pattern in _READ for file in path.glob(pattern)})
    pointers = [name for name in names if is_pointer(path / name)]
    if pointers:
        some = ", ".join(pointers[:4]) + ", …" * (len(pointers) > 4)
        raise ConfigError(
            f"model.path = {str(path)!r}: {some}: Git LFS pointers, which stand for files that are"
            " not there; get the files (git lfs pull)"
        )


def check_folder(path: Path) -> None:
    """Refuses a ``model.path`` that is no folder.

    Raises:
        ConfigError: names the path and the remedy.
    """
    if not path.is_dir():
        seen = "is a file" if path.is_file() else "no such folder"
        raise ConfigError(
            f"model.path = {str(path)!r}: {seen}; give a local folder in the Hugging Face layout"
            f" ({from_hub(path)})"
        )


def cause_of_misfit(path: Path, missing: Collection[str], unused: Collection[str]) -> str | None:
    """Returns why tensors of a model folder do not fit the model, for an error; None where no
    cause is known. ``missing``: names that the model needs. ``unused``: names that the files have.
    """
    for prefix, wrapper in _WRAPPERS.items():
        bare = {name.removeprefix(prefix) for name in unused if name.startswith(prefix)}
        if missing and bare >= set(missing):
            return (
                f"names of tensors begin with {prefix!r}, which {wrapper} adds: save the"
                " state of the module inside it"
            )
    method = quantization_of(path)
    if method is None:
        return None
    return (
        f"the files are quantized (quantization_config of config.json: {method}), and runs train"
        " plain weights; give the folder of the model that was quantized"
    )


def quantization_of(path: Path) -> str | None:
    """Returns the method that ``quantization_config`` of a folder's config.json names."""
    try:
        fields: Any = parse_json((path / "config.json").read_bytes())
        section = fields.get("quantization_config")
    except (OSError, *DAMAGED):
        return None
    if not isinstance(section, dict):
        return None
    method = section.get("quant_method")
    return method if isinstance(method, str) else json.dumps(section)[:80]
