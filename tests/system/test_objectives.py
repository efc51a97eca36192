"""Losses of runs with other objectives against a plain torch loop over the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tests.data.sft import make as sft
from tests.system import conftest as H

STEPS, BATCH, LENGTH, RATE, DECAY = 6, 4, 48, 0.002, 0.1
TOLERANCE = 1e-6


def settings(folder: Path, records: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """Keys of a run on records, in their order."""
    logging.disable_progress_bar()  # its monitor is a thread that stays
    sft.save(folder / "model", "qwen2_5")
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    made: dict[str, Any] = {
        "model": {"hf": None, "path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "path": str(path),
            "tokenizer": None,
            "sequence_length": LENGTH,
            "packing": "none",
            "shuffle": False,
        },
        "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": 2, "clip_grad_norm": None},
        "optimizer": {
            "lr": RATE,
            "betas": [0.9, 0.999],
            "weight_decay": DECAY,
            "schedule": "constant",
            "warmup_steps": 0,
            "min_lr": 0.0,
        },
    }
    return H.merge(made, sections)


class PlainLoop:
    """transformers' model and torch's AdamW, which leaves vectors without weight decay."""

    def __init__(self, folder: Path) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = loaded.train()
        named = dict(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in named.values() if p.ndim >= 2]},
                {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=RATE,
            betas=(0.9, 0.999),
            weight_decay=DECAY,
        )

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """Log-probabilities of all tokens but the first, (tokens - 1,)."""
        logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    def step(self, loss: torch.Tensor) -> float:
        """Takes a step down a loss; returns its value."""
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def check(run_dir: Path, expected: list[float], tolerance: float = TOLERANCE) -> None:
    """The run's losses are the expected ones."""
    losses = [line["loss"] for line in H.metrics(run_dir)]
    assert len(losses) == len(expected)
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    print(f"largest relative difference {worst:.2g}")
    assert worst <= tolerance, list(zip(losses, expected, strict=True))


def weighted_records() -> list[dict[str, Any]]:
    """Ready ids with labels and weights, some of which are negative or 0."""
    rng, made = np.random.default_rng(8), []
    for number in range(STEPS * BATCH):
        length = 8 + int(rng.integers(40))
        ids = rng.integers(0, 200, length).tolist()
        prompt = 1 + number % 5
        record = {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}
        weights = (rng.normal(size=length) + 0.8).round(3)
        weights[prompt + 1] = 0.0
        made.append(
            record | {"weights": weights.tolist()} | ({"weight": 2.5} if number % 3 else {})
        )
    return made


def test_weights_scale_the_losses_of_tokens(runner: H.Runner) -> None:
    """Two devices, split backward and recomputation; the mean is over all tokens with a label."""
    records = weighted_records()
    data = {"objective": "weighted"}
    schedule = {"scheme": "zb-h1", "recompute": "full"}
    changes = settings(runner.root, records, data=data, schedule=schedule)
    run_dir = runner.train(runner.configure("run", changes))
    loop, losses = PlainLoop(runner.root / "model"), []
    for first in range(0, len(records), BATCH):
        total, counted = torch.zeros(()), 0
        for record in records[first : first + BATCH]:
            labels = torch.tensor(record["labels"][1:])
            weights = torch.tensor(record["weights"][1:]) * record.get("weight", 1.0)
            kept = labels != -100
            total = total - (loop.log_probabilities(record["input_ids"]) * weights)[kept].sum()
            counted += int(kept.sum())
        losses.append(loop.step(total / counted))
    check(run_dir, losses)


def pair_records() -> list[dict[str, Any]]:
    """Prompts with two answers, as texts; every third has its prompt in the answers."""
    bits, made = sft.drawn(21), []
    for number in range(STEPS * BATCH // 2):
        words = [sft.WORDS[n % len(sft.WORDS)] for n in bits.random_raw(24).tolist()]
        prompt, *answers = " ".join(words[:6]), " " + " ".join(words[6:12]), " ".join(words[13:])
        if number % 3:
            made.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            made.append({"chosen": prompt + " yes", "rejected": prompt + " no, " + words[0]})
    return made


def test_pairs(runner: H.Runner) -> None:
    """Two devices, split backward and recomputation; references are those of the start."""
    records = pair_records()
    data: dict[str, Any] = {"objective": "dpo", "dpo": {"beta": 0.3, "label_smoothing": 0.1}}
    data["sequence_length"] = 160
    schedule = {"scheme": "zb-h1", "recompute": "full"}
    changes = settings(runner.root, records, data=data, schedule=schedule)
    run_dir = runner.train(runner.configure("run", changes))
    loop, losses = PlainLoop(runner.root / "model"), []
    tokenizer = AutoTokenizer.from_pretrained(runner.root / "model")
    end, start = tokenizer.eos_token, PlainLoop(runner.root / "model")
    for first in range(0, len(records), BATCH // 2):
        margins = []
        for record in records[first : first + BATCH // 2]:
            ratios = []
            prompt = record.get("prompt", "")
            whole = [prompt + record[name] + end for name in ("chosen", "rejected")]
            chosen, rejected = (tokenizer(text)["input_ids"] for text in whole)
            given = tokenizer(prompt or common(record["chosen"], record["rejected"]))["input_ids"]
            shared = min(common_ids(given, chosen), common_ids(given, rejected))
            for ids in (chosen, rejected):
                policy = loop.log_probabilities(ids)[max(0, shared - 1) :].sum()
                with torch.no_grad():
                    reference = start.log_probabilities(ids)[max(0, shared - 1) :].sum()
                ratios.append(policy - reference)
            margins.append(0.3 * (ratios[0] - ratios[1]))
        margin = torch.stack(margins)
        loss = -0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)
        losses.append(loop.step(loss.mean()))
    check(run_dir, losses, 1e-5)
    lines = H.metrics(run_dir)
    assert [line["pairs"] for line in lines] == [BATCH // 2] * STEPS
    assert lines[0]["margin"] == 0.0 and lines[0]["pair_accuracy"] == 0.0
    assert lines[-1]["tokens"] > 2 * BATCH


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_pairs_without_a_reference(runner: H.Runner, objective: str) -> None:
    """Two devices, split backward and recomputation. The likelihood term has its mean over all
    tokens of the step, in several micro-batches.
    """
    records = pair_records()
    terms: dict[str, Any] = {"orpo": {"beta": 0.7}, "simpo": {"beta": 2.5, "gamma": 0.9}}
    data = {"objective": objective, objective: terms[objective], "sequence_length": 160}
    if objective == "simpo":
        terms["simpo"] |= {"likelihood": 0.5, "likelihood_mean": "samples"}
    schedule = {"scheme": "zb-h1", "recompute": "full"}
    changes = settings(runner.root, records, data=data, schedule=schedule)
    run_dir = runner.train(runner.configure("run", changes))
    loop, losses = PlainLoop(runner.root / "model"), []
    tokenizer = AutoTokenizer.from_pretrained(runner.root / "model")
    for first in range(0, len(records), BATCH // 2):
        scores, texts, means = [], [], []
        for record in records[first : first + BATCH // 2]:
            prompt = record.get("prompt", "")
            whole = [prompt + record[n] + tokenizer.eos_token for n in ("chosen", "rejected")]
            chosen, rejected = (tokenizer(text)["input_ids"] for text in whole)
            given = tokenizer(prompt or common(record["chosen"], record["rejected"]))["input_ids"]
            shared = min(common_ids(given, chosen), common_ids(given, rejected))
            tokens = [loop.log_probabilities(ids) for ids in (chosen, rejected)]
            scores.append([each[max(0, shared - 1) :].mean() for each in tokens])
            texts.append(tokens[0])
            means.append(scores[-1][0])
        better, worse = (torch.stack([pair[n] for pair in scores]) for n in (0, 1))
        if objective == "orpo":
            odds = [torch.log(each.exp() / (1 - each.exp())) for each in (better, worse)]
            loss = -0.7 * F.logsigmoid(odds[0] - odds[1]).mean() - torch.cat(texts).mean()
        else:
            loss = -F.logsigmoid(2.5 * (better - worse) - 0.9).mean()
            loss = loss - 0.5 * torch.stack(means).mean()
        losses.append(loop.step(loss))
    check(run_dir, losses, 1e-5)
    lines = H.metrics(run_dir)
    assert [line["pairs"] for line in lines] == [BATCH // 2] * STEPS
    assert lines[0]["margin"] != 0.0
    assert not list((run_dir / "data").glob("references-*"))


def test_pairs_train_an_adapter(runner: H.Runner) -> None:
    """The reference of a new adapter is the base: the first margins are 0."""
    data: dict[str, Any] = {"objective": "dpo", "sequence_length": 160}
    changes = settings(runner.root, pair_records(), data=data, adapter={"r": 4, "dropout": 0.5})
    lines = H.metrics(runner.train(runner.configure("run", changes)))
    assert lines[0]["margin"] == 0.0 and lines[0]["loss"] == pytest.approx(np.log(2))
    assert len({line["loss"] for line in lines[1:]}) == STEPS - 1


def common(chosen: str, rejected: str) -> str:
    """Returns the prompt of two texts, without the space in front of the answers."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return chosen[: next(n for n, (a, b) in pairs if a != b)].removesuffix(" ")


def common_ids(ids: list[int], others: list[int]) -> int:
    """Returns the number of first ids in common."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ids), len(others)))
