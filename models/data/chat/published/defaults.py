"""Values of ``data.chat_template_kwargs`` inside of an exported chat template. No torch.

Users of an export call ``apply_chat_template`` without these values. A line in front of the
template sets the values that a caller does not give, so the template renders as in the training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

_START, _END = "{# Defaults of data.chat_template_kwargs #}", "{# end of defaults #}\n"
_HEAD = re.compile(f"(?:{re.escape(_START)}.*?{re.escape(_END)})+", re.DOTALL)
_CONSTANTS = ("true", "false", "none")


def with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """Returns a template with the values of variables that a caller does not set.

    Leaves out variables that no template can name. transformers removes the line break behind the
    last tag. So the rest renders as without this line.
    """
    settings = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in variables.items()
        if name.isidentifier() and not iskeyword(name) and name not in _CONSTANTS
    )
    return f"{_START}{settings}{_END}{template}" if settings else template


def split_defaults(template: str) -> tuple[str, str]:
    """Returns the lines of :func:`with_defaults` in front of a template, and the rest."""
    match = _HEAD.match(template)
    return ("", template) if match is None else (match[0], template[match.end() :])


def _literal(value: Any) -> str:
    """Returns a JSON value as Jinja writes it."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(str(k))}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False)
