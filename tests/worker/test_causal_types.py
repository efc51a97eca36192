"""All causal types that transformers has, tiny, through a worker: each is equal to transformers'
own model, or refused with the reason that docs/MODELS.md lists.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest
import transformers
from transformers.utils import logging

from penstock.host.errors import PenstockError
from tests.worker.causal_types import TYPES, save
from tests.worker.folder_parity import compare

DOCUMENT = Path(__file__).parents[2] / "docs" / "MODELS.md"
EQUAL, UNSUITED = "equal", "not compared"
REASONS = {
    "is an encoder, which sees": "encoders",
    "has no list of that many layers": "decoders of encoder-decoders, layers counted otherwise",
    "cannot be taken apart into layers": "not one layer after the other",
    "which does not follow from the batch": "layers that share results",
}
"""Parts of refusals, and the rows of the document's table."""


def documented() -> dict[str, str]:
    """Returns the outcome of each type in the table of docs/MODELS.md."""
    section = DOCUMENT.read_text().split("## All causal types")[1].split("\n## ")[0]
    outcomes: dict[str, str] = {}
    row = ""
    for first, types in re.findall(r"^\|([^|]*)\|([^|]*)\|$", section, re.MULTILINE)[2:]:
        row = first.strip() or row
        outcomes |= dict.fromkeys(types.replace("`", "").split(), row)
    return outcomes


def outcome(model_type: str, folder: Path) -> str:
    """Returns the row of the table that a type belongs to.

    Raises:
        AssertionError: losses, gradients or files differ from transformers'.
    """
    try:
        save(model_type, folder / "model")
    except Exception:  # the sizes do not suit the type, or transformers lacks a package
        return UNSUITED
    try:
        compared = compare(folder / "model", folder / "run", workers=1)
    except PenstockError as error:
        return next((row for part, row in REASONS.items() if part in str(error)), str(error))
    assert compared.loss < 1e-6, (model_type, compared)
    assert compared.gradients < 1e-5, (model_type, compared)
    assert compared.exported == [], (model_type, compared)
    return EQUAL


def as_table(outcomes: dict[str, str]) -> str:
    """Returns the table of docs/MODELS.md."""
    lines = ["| | types |", "| --- | --- |"]
    for row in (EQUAL, *REASONS.values(), UNSUITED):
        types = [f"`{name}`" for name, found in outcomes.items() if found == row]
        wrapped = textwrap.wrap(" ".join(types), 90, break_on_hyphens=False)
        lines += [f"| {'' if i else row} | {part} |" for i, part in enumerate(wrapped)]
    return "\n".join(lines)


def test_the_list_has_every_type() -> None:
    version = re.search(r"transformers ([\d.]+)", DOCUMENT.read_text().split("## All causal")[1])
    assert version is not None
    if not transformers.__version__.startswith(version[1].rstrip(".")):
        pytest.skip(f"the list is that of transformers {version[1]}")
    assert sorted(documented()) == sorted(TYPES)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_every_type_is_equal_or_refused(tmp_path: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outcomes = {}
    for model_type in TYPES:
        folder = tmp_path / model_type
        folder.mkdir()
        outcomes[model_type] = outcome(model_type, folder)
        shutil.rmtree(folder)
    print(as_table(outcomes))
    assert outcomes == documented()
