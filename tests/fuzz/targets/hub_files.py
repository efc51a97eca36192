"""Files of the Hub that decide what is fetched, and the record that a run keeps of them."""

from __future__ import annotations

from pathlib import Path

from penstock.config.hub_names import HubName
from penstock.config.schema import parse_config
from penstock.daemons.node.preparing.hub import FORMAT, RECORD, HubFiles
from penstock.models.hub.layouts import data_files, weights_of
from penstock.protocol.plan.positions import position_warning
from tests.fuzz.target import Form, Target, plainly
from tests.fuzz.targets.run_files import dumped, json_file

CONFIG = parse_config({"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}})
PAGE = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/a*.jsonl
---
# Rows
"""


def read_page(data: bytes) -> object:
    """Returns the files of a split of a repository with this page."""
    name = HubName.parse("org/rows")
    assert name is not None
    files = ("README.md", "data/a.jsonl", "data/b.jsonl")
    return data_files(name, files, data.decode(errors="replace"), "train")


def read_index(data: bytes) -> object:
    """Returns the files of weights that an index names."""
    return weights_of(("a.safetensors", "model.safetensors.index.json"), {}, data)


def read_record(folder: Path) -> object:
    """Returns whether the recorded files are there."""
    files = HubFiles.of_run(CONFIG, folder, lambda line: None)
    return files.local("model.path", Path("/nonexistent"), "model"), files.earlier


def read_positions(folder: Path) -> object:
    """Returns the warning about the rows of a model in a folder."""
    model = CONFIG.model.model_copy(update={"path": folder, "hf": None})
    return position_warning(CONFIG.model_copy(update={"model": model}))


HUB_FILES = (
    Target(
        name="hub-page",
        open=plainly(read_page),
        covers=("models.hub.layouts._header",),
        seeds=lambda: [PAGE.encode()],
    ),
    Target(
        name="hub-index",
        open=plainly(read_index),
        covers=("models.hub.layouts.weights_of",),
        seeds=lambda: dumped({"weight_map": {"a": "a.safetensors"}}),
        form=Form.JSON,
    ),
    json_file(
        "hub-record",
        RECORD,
        read_record,
        ("daemons.node.preparing.hub._recorded",),
        {
            "format": FORMAT,
            "fetched": [
                {
                    **{"use": "model", "name": "org/m", "split": None, "commit": "0" * 40},
                    **{"folder": "/nonexistent", "place": "", "part": None},
                    "files": {"config.json": 9},
                }
            ],
        },
    ),
    json_file(
        "positions",
        "config.json",
        read_positions,
        ("protocol.plan.positions.position_warning",),
        {
            "model_type": "llama",
            "max_position_embeddings": 16,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "text_config": {"n_positions": 8},
        },
    ),
)
