"""Models of several parts, such as one for pictures and one for text: the text model inside.

A run trains the text model by itself. Files of the folder have the names of the whole model, which
:class:`Composite` turns into those of the text model and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from penstock.host.errors import ConfigError, reason
from penstock.models.surgery.probe import refused


def text_part(hf_config: PretrainedConfig) -> PretrainedConfig | None:
    """Returns the configuration of the text model inside of a composite one. None: the model is no
    composite, or transformers does not know its text model alone.
    """
    inner: PretrainedConfig = hf_config.get_text_config(decoder=True)
    if inner.model_type == hf_config.model_type or type(inner) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    return inner


@dataclass(frozen=True, slots=True)
class Composite:
    """A whole model on the meta device, and the place of the text model in it.

    Text-model names that begin with ``inside`` begin with ``outside`` in the whole model. Its other
    names, such as the head's, are the same in both. Both prefixes end in a dot or are empty.
    """

    model: Any
    inside: str
    outside: str

    @classmethod
    def of(cls, hf_config: PretrainedConfig, path: Path) -> Composite | None:
        """Returns the model of a folder's configuration; None where it is no composite.

        Raises:
            ConfigError: the whole model cannot be built, or has no text model at one place.
        """
        text_config = text_part(hf_config)
        if text_config is None:
            return None
        named = (getattr(hf_config, "architectures", None) or [""])[0]
        kind: Any = getattr(transformers, str(named), None)
        if kind is None or getattr(kind, "config_class", None) is not type(hf_config):
            raise ConfigError(
                f"architectures of {path / 'config.json'} = {named!r}: transformers has no such"
                f" model of {hf_config.model_type!r}, by which the names in the files are known"
            )
        explain = f"model: transformers cannot build {named} from {path / 'config.json'}"
        with refused(lambda error: f"{explain}: {reason(error)}"), torch.device("meta"):
            model = kind(hf_config)
            text_kind: Any = AutoModelForCausalLM
            text = text_kind.from_config(text_config)
        base = text.base_model_prefix
        for whole, inside in ((text, ""), (getattr(text, base, None), f"{base}.")):
            places = [name for name, module in model.named_modules() if type(module) is type(whole)]
            if len(places) == 1 and places[0]:
                return cls(model, inside, f"{places[0]}.")
        raise ConfigError(
            f"model: {named} has no single part of type {type(text).__name__}; give a folder of"
            f" model type {text_config.model_type!r}"
        )

    def whole_name(self, name: str) -> str:
        """Returns the name in the whole model of a tensor of the text model."""
        if name.startswith(self.inside):
            return self.outside + name.removeprefix(self.inside)
        return name

    def text_name(self, name: str) -> str:
        """Returns the name that a tensor of the whole model would have in the text model."""
        if name.startswith(self.outside):
            return self.inside + name.removeprefix(self.outside)
        return name
