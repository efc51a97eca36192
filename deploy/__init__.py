"""Templates and their values for Slurm, systemd and Kubernetes, which start the nodes of a run.

Each folder holds the templates of one system and the module that fills them in. ``@NAME@`` in a
template stands for a value: neither systemd, shells nor YAML give ``@`` a meaning in these places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_PLACE = re.compile(r"@([A-Z_]+)@")


def fill(template: Path, values: Mapping[str, str]) -> str:
    """Returns the text of a template with every ``@NAME@`` replaced by its value.

    Raises:
        KeyError: a name has no value: the template and its module disagree.
    """
    text = template.read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: values[match[1]], text)
