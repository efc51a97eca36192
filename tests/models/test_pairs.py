"""Pairs of answers as rows, and their reference log-probabilities."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.rows.packing import Packing
from penstock.models.inference import references
from penstock.models.inference.evaluate import prepared_rows
from penstock.models.inference.loading import ModelPlace
from penstock.models.inference.references import write_references
from penstock.models.surgery.hf import without_dropout
from penstock.workers.data import HeldOutData, RowDataset, micro_batches, open_dataset
from tests.data.dpo.make import pairs
from tests.models.test_rows import TALK, chat, made, samples, written

TEXT = {"prompt": "Sky?", "chosen": " blue", "rejected": " green and red"}


def prepared(folder: Path, records: list[dict[str, Any]], **data: Any) -> Config:
    """A configuration of a prepared run on pairs."""
    path = written(folder, records)
    keys = {"path": str(path), "objective": "dpo", "shuffle": False, "cache_limit": 0, **data}
    return made(folder / "run", keys, train={"global_batch": 2})


def texts(folder: Path) -> list[tuple[str, str]]:
    """Returns prompt and answer of each row; tokens are bytes and the end token."""
    rows = []
    for _, _, ids, labels in samples(folder):
        counted = [i for i, label in zip(ids, labels, strict=True) if label != IGNORED_LABEL]
        given = ids[: len(ids) - len(counted)]
        rows.append(tuple(bytes(i for i in part if i < 256).decode() for part in (given, counted)))
    return rows


@pytest.mark.parametrize(
    "record",
    [
        TEXT,
        {"chosen": "Sky? blue", "rejected": "Sky? green and red"},
        {**TEXT, "messages": TALK, "score_chosen": 3.0},
    ],
)
def test_texts_count_behind_their_prompt(tmp_path: Path, record: dict[str, Any]) -> None:
    config = prepared(tmp_path, [record])
    assert texts(tmp_path / "run") == [("Sky?", " blue"), ("Sky?", " green and red")]
    assert config.train.micro_batch == 2


@pytest.mark.parametrize("prompt", ["messages", "none", "text"])
def test_conversations_count_behind_their_prompt(tmp_path: Path, prompt: str) -> None:
    """A first question in a text column does not change the prompt that both answers begin with."""
    talk = chat("Hi", "Yo", "And?")["messages"]
    answers = [[{"role": "assistant", "content": each}] for each in ("Fine", "Bad day")]
    record: dict[str, Any] = {"chosen": answers[0], "rejected": answers[1], "prompt": talk}
    if prompt != "messages":
        record = {"chosen": talk + answers[0], "rejected": talk + answers[1]}
    if prompt == "text":
        record["prompt"] = "Hi"
    prepared(tmp_path, [record], sequence_length=160)
    first, second = texts(tmp_path / "run")
    assert first[0] == second[0] and first[0].endswith("And?<|im_end|>\n<|im_start|>assistant\n")
    assert (first[1], second[1]) == ("Fine<|im_end|>\n", "Bad day<|im_end|>\n")


def test_pairs_stay_whole_in_every_order(tmp_path: Path) -> None:
    config = prepared(tmp_path, [{**TEXT, "prompt": f"{n}?"} for n in range(9)], shuffle=True)
    dataset = open_dataset(tmp_path / "run/data", "train", config)
    assert isinstance(dataset, RowDataset) and dataset.num_sequences == 18
    order = np.concatenate([dataset.rows(first, 6) for first in (0, 6, 12)])
    assert order.tolist() != list(range(18)) and sorted(order.tolist()) == list(range(18))
    assert (order[1::2] == order[0::2] + 1).all() and not (order[0::2] % 2).any()
    assert [int(dataset.rows(n, 1)[0]) for n in range(18)] == order.tolist()
    other = dataset.rows(18, 18).tolist()
    assert sorted(other) == list(range(18)) and other != order.tolist()


@pytest.mark.parametrize(
    ("too_long", "kept", "tally"),
    [
        ("truncate", ["Sky?", "Day?"], {"truncated": 3, "uncounted": 2}),
        ("drop", ["Sky?"], {"dropped": 4}),
    ],
)
def test_long_answers_lose_their_end_and_long_prompts_are_left_out(
    tmp_path: Path, too_long: str, kept: list[str], tally: dict[str, int]
) -> None:
    long = {"prompt": "Day?", "chosen": " yes", "rejected": " no" * 9}
    records = [TEXT, long, {**TEXT, "prompt": "a prompt that fills a row"}]
    prepared(tmp_path, records, sequence_length=22, too_long=too_long)
    rows = texts(tmp_path / "run")
    assert [given for given, _ in rows] == [each for each in kept for _ in range(2)]
    entry = json.loads((tmp_path / "run/data/meta.json").read_text())["train"]
    assert {
        k: v for k, v in entry["tally"].items() if k in ("truncated", "uncounted", "dropped") and v
    } == tally


def test_an_empty_answer_stays_beside_the_other_one(tmp_path: Path) -> None:
    """An empty answer without an end token has no label; its log-probability is 0."""
    prepared(tmp_path, [{**TEXT, "rejected": ""}], eos=False, packing="none")
    assert texts(tmp_path / "run") == [("Sky?", " blue"), ("Sky?", "")]


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_an_empty_answer_has_no_mean(tmp_path: Path, objective: str) -> None:
    """An end token gives each answer a token. Without one the pair is refused, or skipped."""
    records, terms = [{**TEXT, "rejected": ""}, TEXT], {"objective": objective}
    prepared(tmp_path, records, **terms)
    assert texts(tmp_path / "run")[:2] == [("Sky?", " blue"), ("Sky?", "")]
    terms = {**terms, "eos": False}
    with pytest.raises(ConfigError, match=r"the rejected answer has no token.*bad_records: skip"):
        prepared(tmp_path, records, **terms)
    with pytest.raises(ConfigError, match=r"the chosen answer has no token"):
        prepared(tmp_path, [{"chosen": "S", "rejected": "So", "prompt": ""}], **terms)
    prepared(tmp_path, records, **terms, bad_records="skip")
    assert texts(tmp_path / "run") == [("Sky?", " blue"), ("Sky?", " green and red")]


def test_the_likelihood_term_counts_chosen_rows(tmp_path: Path) -> None:
    """Prompts count with ORPO. An answer may equal the other one, and lose its end."""
    same = {"prompt": "Day?", "chosen": " yes", "rejected": " yes"}
    long = {"prompt": "Long?", "chosen": " no" * 9, "rejected": " n"}
    config = prepared(tmp_path, [TEXT, same, long], sequence_length=22, objective="orpo")
    dataset = open_dataset(tmp_path / "run/data", "train", config)
    batches, pairs = micro_batches(dataset, 0, 6, 2)
    assert pairs == 3 and [batch.likelihood_tokens.tolist() for batch in batches] == [
        *([9], [8], [21]),
    ]
    for batch in batches:
        given = batch.preferences
        assert given is not None and given.references is None and given.likelihoods is not None
        assert given.likelihoods.tolist() == [pytest.approx(3 / (9 + 8 + 21))]
        assert given.text_labels is not None and (given.text_labels[1] == IGNORED_LABEL).all()
        tokens = int(batch.likelihood_tokens[0])
        ids, labels = batch.input_ids[0], given.text_labels[0]
        assert labels[: min(tokens, 21)].tolist() == ids[1 : tokens + 1].tolist()


@pytest.mark.parametrize(
    ("terms", "factors"),
    [
        ({"likelihood": 0.5}, [[2 / 14], [2 / 14]]),
        ({"likelihood": 0.5, "likelihood_on": "all"}, [[1 / 16], [1 / 16]]),
        ({"likelihood": 0.5, "likelihood_mean": "samples"}, [[0.5 / 6], [0.5 / 1]]),
        ({}, [None, None]),
    ],
)
def test_factors_of_the_likelihood_term(
    tmp_path: Path, terms: dict[str, Any], factors: list[list[float] | None]
) -> None:
    """The last batch of an evaluation counts its own pairs alone."""
    other = {"prompt": "Daytime", "chosen": "", "rejected": "b"}
    keys = {"objective": "simpo", "simpo": terms, "shuffle": False, "sequence_length": 32}
    config = prepared(tmp_path, [TEXT, other], **keys)
    data = open_dataset(tmp_path / "run/data", "train", config)
    batches, _ = micro_batches(data, 0, 4, 2)
    made = [b.preferences.likelihoods for b in batches if b.preferences is not None]
    expected = [None if f is None else pytest.approx(f) for f in factors]
    assert [None if m is None else m.tolist() for m in made] == expected
    held = HeldOutData(dataset=data, num_batches=1, global_batch=6, micro_batch=2, repeats=False)
    batches, pairs = held.batches(0)
    assert pairs == 2
    made = [b.preferences.likelihoods for b in batches if b.preferences is not None]
    assert [None if m is None else m.tolist() for m in made[:2]] == expected
    assert made[2] is None or made[2].tolist() == [0.0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"orpo": {"beta": 0}}, "data.orpo.beta"),
        ({"orpo": {"beta": -0.1}}, "data.orpo.beta"),
        ({"orpo": {"likelihood": -1}}, "data.orpo.likelihood"),
        ({"orpo": {"gamma": 0.5}}, "data.orpo.gamma"),
        ({"orpo": {"reference": "a"}}, "data.orpo.reference"),
        ({"objective": "simpo", "simpo": {"gamma": -0.5}}, "data.simpo.gamma"),
        ({"objective": "simpo", "simpo": {"beta": 0}}, "data.simpo.beta"),
        ({"objective": "simpo", "simpo": {"label_smoothing": 0.5}}, "simpo.label_smoothing"),
        (
            {"objective": "dpo", "simpo": {"gamma": 0.5, "beta": 3}},
            "data.simpo: has beta, gamma, and data.objective is dpo; remove data.simpo, or set"
            " data.objective: simpo",
        ),
        ({"dpo": {"beta": 0.2}}, "data.dpo: has beta, and data.objective is orpo"),
        ({"objective": "next-token", "orpo": {"beta": 1.0}}, "data.objective is next-token"),
        (
            {"orpo": {"likelihood": 0, "likelihood_on": "completion"}},
            "data.orpo.likelihood_on completion: data.orpo.likelihood is 0",
        ),
        (
            {"objective": "simpo", "simpo": {"likelihood_mean": "samples"}},
            "data.simpo.likelihood_mean samples: data.simpo.likelihood is 0",
        ),
        ({"objective": "kto"}, "data.objective"),
        ({"packing": "best-fit"}, "data.objective orpo: data.packing is best-fit"),
    ],
)
def test_terms_of_losses_without_a_reference_are_checked(data: dict[str, Any], words: str) -> None:
    keys = {"model": {"hf": {"model_type": "llama"}}}
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_config({**keys, "data": {"path": "a.jsonl", "objective": "orpo", **data}})


def test_labels_of_pairs_have_no_smoothing_without_a_reference() -> None:
    keys: dict[str, Any] = {"model": {"hf": {"model_type": "llama"}}}
    keys["train"] = {"label_smoothing": 0.1}
    for objective, words in (
        ("orpo", "no labels to smooth; remove the key"),
        ("simpo", "data.simpo.label_smoothing smooths preferences"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config({**keys, "data": {"path": "a.jsonl", "objective": objective}})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no value in the column rejected"),
        ({"prompt": "a", "completion": "b"}, "has no value in the column chosen"),
        ({"chosen": TALK, "rejected": "no"}, "rejected = 'no': needs a list"),
        ({"chosen": TALK, "rejected": chat("Ho", "x")["messages"]}, "no first turn in common"),
        (
            {"chosen": [TALK[0], {**TALK[1], "train": True}], "rejected": TALK},
            "a message has train or weight",
        ),
    ],
)
def test_records_without_a_pair_are_refused(
    tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepared(tmp_path, [record])


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"global_batch": 3}}, "train.global_batch 3: with data.objective dpo a pair"),
        ({"train": {"micro_batch": 1}}, "use an even number, such as 2"),
        ({"train": {"loss_mean": "samples"}}, "dpo has the mean over pairs; remove the key"),
        ({"train": {"label_smoothing": 0.1}}, "data.dpo.label_smoothing smooths preferences"),
        ({"train": {"keep_best": "perplexity", "eval_every": 1}}, "are loss, pair_accuracy"),
        ({"data": {"packing": "best-fit"}}, "data.packing is best-fit"),
        ({"data": {"train_on": "all"}}, "data.train_on is all"),
        ({"data": {"too_long": "split"}}, "data.too_long is split"),
        ({"data": {"path": None, "sources": [{"path": "a", "format": "text"}]}}, "format text"),
        ({"data": {"dpo": {"beta": 0}}}, "data.dpo.beta"),
        ({"cluster": {"device": "emulated:a100"}}, "makes up its model"),
    ],
)
def test_keys_that_do_not_go_with_pairs_are_refused(sections: dict[str, Any], words: str) -> None:
    keys: dict[str, Any] = {
        "model": {"hf": {"model_type": "llama"}},
        "data": {"path": "a.jsonl", "objective": "dpo", **sections.pop("data", {})},
        **sections,
    }
    with pytest.raises(ConfigError, match=words):
        parse_config(keys)


def test_pairs_without_their_objective_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [TEXT])
    sources = {"sources": [{"path": str(path), "format": "preference"}]}
    with pytest.raises(
        ConfigError, match=r"is a pair of answers, and data.objective is next-token"
    ):
        made(tmp_path / "run", sources)


def expected(run_dir: Path, split: str) -> list[float]:
    """The summed log-probabilities of each row's labels by transformers' model of the folder."""
    config = json.loads((run_dir / "data/meta.json").read_text())
    assert config[split]["rows"]["packing"] == Packing.NONE.value
    model = AutoModelForCausalLM.from_pretrained(run_dir.parent / "model", dtype=torch.float32)
    sums = []
    for _, _, ids, labels in samples(run_dir, split):
        with torch.no_grad():
            scores = model.eval()(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        counted = [(n - 1, ids[n]) for n in range(1, len(ids)) if labels[n] != IGNORED_LABEL]
        sums.append(sum(float(scores[n, token]) for n, token in counted))
    return sums


def with_model(folder: Path, tied: bool) -> Config:
    """A prepared run from a model's folder, with an evaluation set."""
    hf = AutoConfig.for_model(
        "llama",
        **{"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": tied},
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(hf).save_pretrained(folder / "model")
    held_out = written(folder, pairs("text", 3, seed=4), "other.jsonl")
    return made(
        folder / "run",
        {
            "path": str(written(folder, pairs("text", 7))),
            "objective": "dpo",
            "sequence_length": 96,
            "shuffle": False,
        },
        model={"path": str(folder / "model"), "dtype": "fp32"},
        train={"global_batch": 2},
        eval={"sets": [{"name": "other", "path": str(held_out), "every": 1}]},
    )


@pytest.mark.parametrize("tied", [False, True])
def test_references_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Groups have four rows. A second run takes the numbers from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(references, "_GROUP_BYTES", 4 * 96 * 16 * 4)
    config, run_dir = with_model(tmp_path, tied), tmp_path / "run"
    lines: list[str] = []
    (run_dir / "resolved.yaml").write_text(config.to_yaml())
    write_references(run_dir, lines.append)
    assert "references: train: rows 4 to 8 of 14" in lines
    for split, dataset in (
        ("train", open_dataset(run_dir / "data", "train", config)),
        (
            "eval.other",
            HeldOutData.open(run_dir / "data", config.evaluation_sets[0], config).dataset,
        ),
    ):
        read = [b.preferences for b in dataset.read(0, dataset.num_sequences, 2)]
        values = np.concatenate([p.references for p in read if p is not None])
        np.testing.assert_allclose(values, expected(run_dir, split), rtol=1e-6)
    lines.clear()
    write_references(run_dir, lines.append)
    assert not lines, "they were there"
    meta = json.loads((run_dir / "data/meta.json").read_text())
    del meta["train"]["references"]
    (run_dir / "data/meta.json").write_text(json.dumps(meta))
    write_references(run_dir, lines.append)
    assert lines[-1] == "references: takes those of train that were computed before"
    assert not any("rows 0" in line for line in lines)


def test_an_interrupted_computation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn number at the end is computed again; those of another model are dropped."""
    monkeypatch.setattr(references, "_GROUP_BYTES", 4 * 96 * 16 * 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, run_dir = with_model(tmp_path, False), tmp_path / "run"
    (run_dir / "resolved.yaml").write_text(config.to_yaml())

    def interrupt(line: str) -> None:
        if "rows 8 to 12" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_references(run_dir, interrupt)
    (part,) = (run_dir / "data").glob(".references-train.bin.part")
    whole = part.read_bytes()
    part.write_bytes(whole + b"torn")
    lines: list[str] = []
    write_references(run_dir, lines.append)
    assert "references: train: 8 of 14 rows were computed before" in lines
    assert not part.exists()
    dataset = open_dataset(run_dir / "data", "train", config)
    read = [b.preferences for b in dataset.read(0, 14, 2)]
    values = np.concatenate([p.references for p in read if p is not None])
    np.testing.assert_allclose(values, expected(run_dir, "train"), rtol=1e-6)
    part.write_bytes(b"0" * 64 + whole[64:])
    assert references._Partial(part, "1" * 64).read(14).size == 0


def test_damaged_references_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, run_dir = with_model(tmp_path, False), tmp_path / "run"
    (run_dir / "resolved.yaml").write_text(config.to_yaml())
    write_references(run_dir, lambda line: None)
    path = run_dir / "data/references-train.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.unlink()  # a hard link into the cache
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"references-train.bin.*checksum differs"):
        open_dataset(run_dir / "data", "train", config)


def test_no_dropout_is_left() -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)
    shares = {
        module.p
        for module in AutoModelForCausalLM.from_config(without_dropout(config)).modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert shares == {0.0} and config.resid_pdrop == 0.1


def test_files_are_evaluated_by_their_tokens(tmp_path: Path) -> None:
    """`penstock eval` of a run on pairs takes completions, and refuses pairs."""
    config, scratch = with_model(tmp_path, False), tmp_path / "scratch"
    (tmp_path / "run/resolved.yaml").write_text(config.to_yaml())
    for name in ("a", "b"):
        (scratch / name).mkdir(parents=True)
    place = ModelPlace(config=config, folder=tmp_path / "run", state=tmp_path)
    path = written(tmp_path, [{"prompt": "Sky?", "completion": " blue"}], "plain.jsonl")
    rows = prepared_rows(place, str(path), scratch / "a")
    assert rows.count == 1 and [batch.preferences for batch in rows.batches] == [None]
    with pytest.raises(ConfigError, match=r"Pairs of chosen and rejected answers train with"):
        prepared_rows(place, str(tmp_path / "other.jsonl"), scratch / "b")
