"""Samples that share a row are measured. Types that keep samples apart keep packing. Others get
rows of one sample, or a refusal while the run is prepared.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.models.apart import measure as measuring
from penstock.models.apart import verdicts
from penstock.models.apart.measure import frequency_limit, measure
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.rows.row_file import RowLayout, batch_of, marked
from penstock.models.data.rows.sharing import Sharing
from penstock.models.prepare import prepare
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.data_size import LimitedLengths, mixed_lengths
from penstock.workers.data import open_dataset
from tests.worker.causal_types import reduced

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
PACKED = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3")
PACKED_TOO = ("gpt_neox", "olmo2", "cohere", "qwen3_moe", "starcoder2", "glm4", "granite")
NEIGHBOURS = "a sample's loss and gradients change with the other samples of its row"
LONGROPE = {
    "model_type": "phi3",
    **SIZES,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0, 16.0, 32.0, 64.0],
        "original_max_position_embeddings": 24,
    },
}
DYNAMIC = {
    "model_type": "llama",
    **SIZES,
    "max_position_embeddings": 24,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
RECURRENT = {
    "model_type": "recurrent_gemma",
    **SIZES,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "lru_width": 32,
    "head_dim": 8,
}


def sharing(hf_config: Any, length: int = 48) -> Sharing:
    """The measured sharing of a model."""
    return measure(hf_config, build_skeleton(hf_config), length)


@pytest.mark.parametrize("model_type", [*PACKED, *PACKED_TOO])
def test_common_types_keep_samples_of_a_row_apart(model_type: str) -> None:
    assert sharing(reduced(model_type)) == Sharing(model_type=model_type)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "qwen3_moe"])
def test_full_size_configurations_become_small(model_type: str) -> None:
    """Nothing has the size of the model: a configuration of many GB is measured in a second."""
    assert sharing(CONFIG_MAPPING[model_type](), 4096) == Sharing(model_type=model_type)


@pytest.mark.parametrize(
    "model_type",
    [
        *("recurrent_gemma", "falcon_h1", "inkling_text", "gpt_oss", "qwen3_next", "bamba"),
        *("jamba", "nemotron_h", "granitemoehybrid", "lfm2_moe", "kimi_linear", "olmo_hybrid"),
        *("opt", "mamba", "bloom"),
    ],
)
def test_other_types_do_not(model_type: str) -> None:
    expected = f"in model type {model_type!r} {NEIGHBOURS}"
    assert sharing(reduced(model_type)) == Sharing(
        model_type=model_type, apart=False, reason=expected
    )


def test_a_chunk_that_rows_exceed_is_measured_and_no_longer_one() -> None:
    """Llama 4 cuts a row into chunks, without regard to documents."""
    hf_config = CONFIG_MAPPING["llama4_text"]()
    assert hf_config.attention_chunk_size == 8192
    assert sharing(hf_config, 8192) == Sharing(model_type="llama4_text")
    assert not sharing(hf_config, 8193).apart


def test_padding_that_changes_a_sample_is_measured() -> None:
    for model_type in ("doge", "deepseek_v32", "axk2"):
        long = sharing(CONFIG_MAPPING[model_type](), 4096)
        assert (long.padded, long.apart, long.shorter) == (False, False, 2048)
        assert sharing(CONFIG_MAPPING[model_type](), 2048).padded


def test_a_type_without_a_small_model_counts_as_not_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "candidates", lambda *_, **__: iter(()))
    assert sharing(reduced("llama")) == Sharing(
        model_type="llama",
        apart=False,
        reason="samples of model type 'llama' cannot be compared (no candidate)",
    )


@pytest.mark.parametrize(("fields", "grows"), [(LONGROPE, False), (DYNAMIC, True)])
def test_the_length_at_which_a_sample_changes_frequencies(
    fields: dict[str, Any], grows: bool
) -> None:
    hf_config = AutoConfig.for_model(**fields)
    kind = hf_config.model_type
    assert sharing(hf_config, 24) == Sharing(model_type=kind)
    assert sharing(hf_config, 48) == Sharing(model_type=kind, limit=24, grows=grows)
    assert frequency_limit(build_skeleton(hf_config), 24) is None
    assert frequency_limit(build_skeleton(hf_config), 100_000) == 24


def test_a_measurement_leaves_torch_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert sharing(reduced("mixtral")) == Sharing(model_type="mixtral")
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), before)


def prepared(
    folder: Path, hf: dict[str, Any], lengths: list[int], **data: Any
) -> tuple[Config, list[str]]:
    """A prepared run with samples of these lengths, and the messages."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    records = [{"input_ids": random.integers(3, 250, length).tolist()} for length in lengths]
    (folder / "ids.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = parse_config(
        {
            "model": {"hf": hf},
            "data": {
                "tokenizer": "byte",
                "sequence_length": 48,
                "shuffle": False,
                "sources": [{"path": str(folder / "ids.jsonl"), "format": "tokens"}],
                **data,
            },
            "train": {"global_batch": 1},
        }
    )
    messages: list[str] = []
    prepare(config, folder, progress=messages.append)
    return config, messages


def layout(folder: Path) -> RowLayout:
    """The layout of the training rows."""
    made = RowLayout.of(json.loads((folder / "data" / "meta.json").read_text())["train"])
    assert made is not None
    return made


def test_packing_is_taken_or_refused_by_the_measurement(tmp_path: Path) -> None:
    cause = f"in model type 'recurrent_gemma' {NEIGHBOURS}"
    _, messages = prepared(tmp_path / "auto", RECURRENT, [6, 8, 7])
    assert messages.count(f"data.packing: auto takes rows of one sample: {cause}") == 1
    assert (layout(tmp_path / "auto").rows, layout(tmp_path / "auto").packing) == (3, "none")
    _, messages = prepared(tmp_path / "none", RECURRENT, [6, 8, 7], packing="none")
    assert not [message for message in messages if "packing" in message]
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "asked", RECURRENT, [6, 8, 7], packing="best-fit")
    assert str(caught.value) == (f"data.packing = 'best-fit': {cause}; set data.packing: none")
    _, messages = prepared(tmp_path / "llama", {"model_type": "llama", **SIZES}, [6, 8, 7])
    assert (layout(tmp_path / "llama").rows, layout(tmp_path / "llama").limit) == (1, 0)
    assert not [message for message in messages if "packing" in message]


def documents(folder: Path, hf: dict[str, Any], length: int = 48) -> None:
    """Prepares text with documents that are to be kept apart."""
    folder.mkdir()
    (folder / "text.txt").write_text("the old mill stands by a river " * 40)
    data = {"path": str(folder / "text.txt"), "sequence_length": length, "document_masks": True}
    config = parse_config({"model": {"hf": hf}, "data": data, "train": {"global_batch": 1}})
    prepare(config, folder)


def test_documents_of_text_are_measured_too(tmp_path: Path) -> None:
    documents(tmp_path / "llama", {"model_type": "llama", **SIZES})
    documents(tmp_path / "short", LONGROPE, 24)
    with pytest.raises(ConfigError) as caught:
        documents(tmp_path / "recurrent", RECURRENT)
    assert str(caught.value) == (
        f"data.document_masks: true: in model type 'recurrent_gemma' {NEIGHBOURS}; set"
        " data.document_masks: false"
    )
    with pytest.raises(ConfigError) as caught:
        documents(tmp_path / "long", LONGROPE)
    assert str(caught.value) == (
        "data.document_masks: true: beyond 24 tokens the longest document of a micro-batch decides"
        " the rotary frequencies of model type 'phi3'; set data.document_masks: false, or"
        " data.sequence_length to at most 24"
    )


OBJECTIVE = """
import numpy as np
from penstock.models.data.batch import MicroBatch

def batch(tokens):
    inputs = np.ascontiguousarray(tokens[:, :-1])
    halves = np.broadcast_to(np.arange(inputs.shape[1]) // 24, inputs.shape)
    places = np.broadcast_to(np.arange(inputs.shape[1]) % 24, inputs.shape)
    labels = np.ascontiguousarray(tokens[:, 1:])
    return MicroBatch(
        input_ids=inputs, labels=labels, position_ids=places, document_ids=halves
    )
"""


def test_documents_of_an_objective_are_measured_too(tmp_path: Path) -> None:
    (tmp_path / "documents_of_mine.py").write_text(OBJECTIVE)
    (tmp_path / "text.txt").write_text("the old mill stands by a river " * 40)

    def start(name: str, hf: dict[str, Any]) -> None:
        (tmp_path / name).mkdir()
        objective = {"objective": "documents_of_mine:batch", "sequence_length": 48}
        config = {
            "model": {"hf": hf, "import_path": str(tmp_path)},
            "data": {"path": str(tmp_path / "text.txt"), **objective},
            "train": {"global_batch": 1},
        }
        prepare(parse_config(config), tmp_path / name)

    start("llama", {"model_type": "llama", **SIZES})
    with pytest.raises(ConfigError) as caught:
        start("recurrent", RECURRENT)
    assert str(caught.value) == (
        f"data.objective: in model type 'recurrent_gemma' {NEIGHBOURS}; give its MicroBatch no"
        " document_ids"
    )


@pytest.mark.parametrize("packing", ["none", "auto"])
def test_padding_decides_no_frequencies(packing: str, tmp_path: Path) -> None:
    config, _ = prepared(tmp_path, LONGROPE, [6, 8, 24], packing=packing)
    assert (layout(tmp_path).limit, layout(tmp_path).longest) == (24, 24)
    for batch in open_dataset(tmp_path / "data", "train", config).read(0, layout(tmp_path).rows, 1):
        assert batch.position_ids is not None
        assert batch.position_ids.max() < 24
    assert mixed_lengths(tmp_path) is None


def test_samples_on_both_sides_of_a_limit_get_rows_of_their_own(tmp_path: Path) -> None:
    cause = (
        "samples have 6 to 30 tokens, and in model type 'phi3' a sample beyond 24 changes the"
        " rotary frequencies of others"
    )
    _, messages = prepared(tmp_path / "auto", LONGROPE, [6, 8, 30])
    assert messages.count(f"data.packing: auto takes rows of one sample: {cause}") == 1
    assert layout(tmp_path / "auto").packing == "none"
    assert mixed_lengths(tmp_path / "auto") == LimitedLengths(shortest=6, longest=30, limit=24)
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "asked", LONGROPE, [6, 8, 30], packing="best-fit")
    assert str(caught.value) == (
        f"data.packing = 'best-fit': {cause}; set data.packing: none, or set data.sequence_length"
        " to at most 24"
    )
    _, messages = prepared(tmp_path / "beyond", LONGROPE, [40, 30])
    assert layout(tmp_path / "beyond").packing == "best-fit"
    assert mixed_lengths(tmp_path / "beyond") is None


def test_frequencies_that_depend_on_samples_seen_before(tmp_path: Path) -> None:
    prepared(tmp_path / "short", DYNAMIC, [6, 24])
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "long", DYNAMIC, [30, 40], packing="none")
    assert str(caught.value) == (
        "data.sequence_length = 48: a sample has 40 tokens, and beyond 24 the rotary frequencies of"
        " model type 'llama' depend on the longest sample so far; set data.sequence_length to at"
        " most 24"
    )
    prepared(tmp_path / "cut", DYNAMIC, [30, 40], sequence_length=24)


def test_padding_that_changes_samples_is_refused(tmp_path: Path) -> None:
    doge = {"model_type": "doge", **SIZES, "keep_window_size": 24, "num_experts": 4}
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "long", doge, [6, 8], packing="none")
    assert str(caught.value) == (
        "data.sequence_length = 48: in model type 'doge' a sample's loss and gradients change with"
        " the other rows of its micro-batch and the other samples of its row and the padding behind"
        " it, and rows of samples end in padding; set data.sequence_length to at most 24"
    )
    prepared(tmp_path / "short", doge, [6, 8], packing="none", sequence_length=24)


@pytest.fixture(name="measured")
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The lengths of rows of measurements; the cache of a user is empty."""
    lengths: list[int] = []

    def noted(hf_config: Any, skeleton: Any, length: int) -> Sharing:
        lengths.append(length)
        return measure(hf_config, skeleton, length)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "measure", noted)
    return lengths


def test_a_result_is_kept_by_the_content_of_all_that_decides_it(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = {"model_type": "llama", **SIZES}
    prepared(tmp_path / "first", llama, [6, 8])
    prepared(tmp_path / "first", llama, [6, 8])
    prepared(tmp_path / "second", llama, [5])
    assert measured == [48], "the run has a record, and another run takes the kept result"
    prepared(tmp_path / "longer", llama, [5], sequence_length=64)
    prepared(tmp_path / "wider", {**llama, "hidden_size": 64}, [5])
    assert measured == [48, 64, 48]
    for name, value in (("_code", lambda: "other code"), ("version", lambda name: f"{name} 9")):
        with monkeypatch.context() as patch:
            patch.setattr(verdicts, name, value)
            prepared(tmp_path / name, llama, [6])
    assert measured == [48, 64, 48, 48, 48]


def test_a_damaged_or_open_cache_is_not_used(measured: list[int], tmp_path: Path) -> None:
    llama = {"model_type": "llama", **SIZES}
    prepared(tmp_path / "first", llama, [6])
    (entry,) = (tmp_path / "cache" / "penstock-sharing").iterdir()
    kept = entry.read_text()
    entry.write_text(kept[:-9])
    prepared(tmp_path / "second", llama, [6])
    assert entry.read_text() == kept, "a damaged entry is made again"
    entry.parent.chmod(0o755)
    prepared(tmp_path / "third", llama, [6])
    assert measured == [48, 48, 48]


def test_a_run_that_has_started_keeps_its_result(measured: list[int], tmp_path: Path) -> None:
    llama = {"model_type": "llama", **SIZES}
    config, _ = prepared(tmp_path / "run", llama, [6])
    (tmp_path / "run" / "journal.sqlite").write_bytes(b"")
    record = json.loads((tmp_path / "run" / verdicts.RECORD).read_text())
    (tmp_path / "run" / verdicts.RECORD).write_text(json.dumps({**record, "key": "older code"}))
    shutil.rmtree(tmp_path / "cache")
    assert verdicts.sharing_of(config, tmp_path / "run") == Sharing(model_type="llama")
    (tmp_path / "run" / verdicts.RECORD).unlink()
    assert verdicts.sharing_of(config, tmp_path / "run") == Sharing(), "as it was prepared"
    assert measured == [48]


def test_the_first_token_of_the_next_sample_is_never_predicted() -> None:
    """Also where each token of a sample counts, with its first one."""
    rows = [np.concatenate([marked([5, 6, 7], [(0, 3)]), marked([8, 9], [(0, 2)])])]
    batch = batch_of(rows, 7, 0)
    none = IGNORED_LABEL
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, none, 9, none, none, none]]
    assert batch.position_ids is not None and batch.document_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    lone = batch_of([*rows, marked([5, 6], [(0, 2)])], 7, 0, lone_padding=True)
    assert lone.position_ids is not None and lone.document_ids is not None
    assert lone.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0]]
    assert lone.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5]]
    assert lone.labels.tolist() == [batch.labels[0].tolist(), [6] + [none] * 6]
