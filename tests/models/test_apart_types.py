"""The table of docs/MODELS.md: samples that share a row, for all causal types of transformers."""

from __future__ import annotations

import re
import textwrap

import pytest
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from penstock.models.apart.measure import measure
from penstock.models.data.rows.sharing import Sharing
from penstock.models.surgery.composite import text_part
from penstock.models.surgery.skeleton import Skeleton, build_skeleton, predicts_masked
from tests.worker.causal_types import TYPES, reduced
from tests.worker.test_causal_types import DOCUMENT

TITLE = "## Samples that share a row"
ROW, ANY_ROW = 4096, 1 << 22
APART, SHORT_ROWS = (
    "kept apart in rows of any length",
    "kept apart up to a chunk, or a sparse choice",
)
LONE, UNMADE = "rows of one sample", "rows of one sample: no small model can be tried"
PADDING, UNTRAINED = "no rows with padding", "not trained on a next token"


def outcome(model_type: str) -> str:
    """The row of the table that a type belongs to."""
    built = _model(model_type)
    if built is None:
        return UNTRAINED
    hf_config, skeleton = built
    sharing = measure(hf_config, skeleton, ROW)
    if not sharing.padded and sharing.shorter is None:
        return PADDING
    longest = measure(hf_config, skeleton, ANY_ROW)
    if longest == sharing == Sharing(model_type=hf_config.model_type):
        return APART
    if sharing.apart or sharing.shorter is not None:
        return SHORT_ROWS
    return UNMADE if "cannot be compared" in sharing.reason else LONE


def _model(model_type: str) -> tuple[PretrainedConfig, Skeleton] | None:
    """The sizes that a type has by default; small ones where the defaults are no whole model. None
    for types that are not trained on a next token.
    """
    made = None
    for is_small in (False, True):
        try:
            hf_config = reduced(model_type) if is_small else CONFIG_MAPPING[model_type]()
            hf_config = text_part(hf_config) or hf_config
            if predicts_masked(hf_config):
                return None
            made = hf_config, build_skeleton(hf_config)
        except Exception:  # each type has its own checks
            continue
        if "cannot be compared" not in measure(*made, ROW).reason:
            return made
    return made


def documented() -> dict[str, str]:
    """The row of each type in the document."""
    section = DOCUMENT.read_text().split(TITLE)[1].split("\n## ")[0]
    outcomes: dict[str, str] = {}
    row = ""
    for first, types in re.findall(r"^\|([^|]*)\|([^|]*)\|$", section, re.MULTILINE)[2:]:
        row = first.strip() or row
        outcomes |= dict.fromkeys(types.replace("`", "").split(), row)
    return outcomes


def as_table(outcomes: dict[str, str]) -> str:
    """The table of the document."""
    lines = ["| | types |", "| --- | --- |"]
    for row in (APART, SHORT_ROWS, LONE, UNMADE, PADDING, UNTRAINED):
        types = [f"`{name}`" for name, of_type in outcomes.items() if of_type == row]
        wrapped = textwrap.wrap(" ".join(types), 90, break_on_hyphens=False)
        lines += [f"| {'' if i else row} | {part} |" for i, part in enumerate(wrapped)]
    return "\n".join(lines)


def test_the_table_has_every_type_of_this_transformers() -> None:
    section = DOCUMENT.read_text().split(TITLE)[1]
    version = re.search(r"transformers ([\d.]+)", section)
    assert version is not None
    if not transformers.__version__.startswith(version[1].rstrip(".")):
        pytest.skip(f"the table is that of transformers {version[1]}")
    assert sorted(documented()) == sorted(TYPES)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_every_type_has_the_documented_row() -> None:
    logging.set_verbosity_error()
    outcomes = {model_type: outcome(model_type) for model_type in TYPES}
    print(as_table(outcomes))
    assert outcomes == documented()
