"""Ids and labels of 500 odd conversations equal those of TRL, or a conversation is refused.

``tests/data/chat/masks.json`` has the digests of TRL's rows; ``tests/integration/test_trainers.py``
computes them again, also for templates that the folder does not have.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.host.errors import ConfigError
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import Choices, TrainOn, samples_of
from penstock.models.data.chat.templates import Template
from tests.data.chat.conversations import NUM_CONVERSATIONS
from tests.data.chat.masks import MODES, REFUSED, digest, records

DATA = Path(__file__).parents[1] / "data" / "chat"
END, BEGIN = "<|endoftext|>", "<s>"
SPECIAL = {"eos_token": END, "bos_token": BEGIN, "pad_token": BEGIN}
TEXTS: dict[str, str] = json.loads((DATA / "templates.json").read_text(encoding="utf-8"))
THEIRS = json.loads((DATA / "masks.json").read_text(encoding="utf-8"))["templates"]
TRAIN_ON = {"assistant": TrainOn.ASSISTANT, "completion": TrainOn.COMPLETION}
PLACE = "chats.jsonl, line 1"
LEFT_OUT = ("leaves it out of the rendering", "leaves tools out", "cuts these thoughts")
"""Reasons of a refusal where a template leaves out a part of a record; TRL trains without it."""


def outcomes(template: str, mode: str) -> list[tuple[str, str, str]]:
    """Kind and digest of each conversation of a mode, and the reason of a refusal."""
    encoder = Encoder(Tokenizer.from_file(str(DATA / "tokenizer.json")))
    chosen = Template(name="model", text=template, variables=SPECIAL)
    choices = Choices(train_on=TRAIN_ON[mode], end=END, special_in_text=True)
    made = []
    for kind, record in records(mode, ours=True):
        try:
            (sample,) = samples_of([request_of(PLACE, record)], encoder, chosen, choices)
        except ConfigError as error:
            made.append((kind, REFUSED, str(error)))
        else:
            made.append((kind, digest(sample.ids, sample.labels), ""))
    return made


def compare(template: str, mode: str, theirs: list[str]) -> Counter[str]:
    """Compares all conversations of a mode, and returns numbers of outcomes."""
    ours = outcomes(template, mode)
    counts: Counter[str] = Counter()
    wrong = []
    for number, ((kind, mine, reason), expected) in enumerate(zip(ours, theirs, strict=True)):
        if mine == expected:
            counts["refused by both" if mine == REFUSED else "equal"] += 1
        elif mine == REFUSED:
            left_out = any(words in reason for words in LEFT_OUT)
            counts["left out" if left_out else "refused here alone"] += 1
        else:
            wrong.append((number, kind, mine, expected))
        if mine == REFUSED:
            assert reason.startswith(f"{PLACE}: ") and "\n" not in reason
    assert not wrong, wrong[:20]
    return counts


IN_GATE = (("qwen3", "assistant"), ("phi3", "assistant"), ("qwen2_5", "completion"))
ALL = [
    pytest.param(name, mode, marks=() if (name, mode) in IN_GATE else pytest.mark.slow)
    for name in TEXTS
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), ALL)
def test_ids_and_labels_of_500_conversations_equal_those_of_trl(name: str, mode: str) -> None:
    theirs = THEIRS[name][mode].split()
    assert len(theirs) == NUM_CONVERSATIONS or mode == "completion"
    counts = compare(TEXTS[name], mode, theirs)
    print(name, mode, dict(counts))
    assert counts["equal"] + counts["left out"] > 0.9 * len(theirs)
