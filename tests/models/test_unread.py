"""Columns that no reader takes: those with a meaning for training are refused, others are named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from penstock.config.data import COLUMN_NAMES
from penstock.host.errors import ConfigError
from penstock.models.data.chat import conversation, ready_ids, weights
from penstock.models.data.chat.conversation import pair_of, request_of
from penstock.models.data.chat.masks import samples_of
from penstock.models.data.chat.requests import Format, IdsRequest, PairRequest, RecordForm
from tests.models.test_chat_templates import ENCODER
from tests.models.test_rows import made, samples, written

PLACE = "a.jsonl, line 1"
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CHATS = {"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "Go"}]}
TEXTS = {"chosen": "five", "rejected": "sacks"}
IDS: dict[str, Any] = {"input_ids": [5, 6, 7, 8]}
ALPACA = {"instruction": "Add.", "output": "3"}
LEAVE = "of its source to train without it"


def labels(**columns: Any) -> list[int]:
    """The labels of four ready ids with other columns, as a row has them."""
    request = request_of(PLACE, IDS | columns)
    assert isinstance(request, IdsRequest)
    (sample,) = samples_of([request], ENCODER)
    return sample.labels


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"completion_mask": [0, 0, 1, 1]}, [-100, -100, 7, 8]),
        ({"assistant_masks": [0, 1, 0, 1]}, [-100, 6, -100, 8]),
        ({"assistant_masks": [False, True, False, True]}, [-100, 6, -100, 8]),
        ({"assistant_masks": [0.0, 1.0, 0.0, 1.0]}, [-100, 6, -100, 8]),
        # TRL counts an id that has 1 in all masks.
        (
            {"assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]},
            [-100, -100, 7, -100],
        ),
        ({"attention_mask": [1, 1, 1, 1]}, [5, 6, 7, 8]),
        ({"attention_mask": [1, 1, 1, 0]}, [5, 6, 7, -100]),
        ({"attention_mask": [1, 1, 0, 0], "completion_mask": [0, 1, 1, 1]}, [-100, 6, -100, -100]),
        ({"labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}, [-100, 6, 7, -100]),
        # Labels decide in TRL; they may leave out more than the masks.
        ({"labels": [-100, -100, -100, 8], "completion_mask": [0, 0, 1, 1]}, [-100, -100, -100, 8]),
        ({"completion_mask": None, "attention_mask": None, "labels": None}, [5, 6, 7, 8]),
    ],
)
def test_ready_ids_count_as_their_masks_say(columns: dict[str, Any], expected: list[int]) -> None:
    assert labels(**columns) == expected


def test_rows_of_parquet_have_the_labels_of_their_masks(tmp_path: Path) -> None:
    kinds = {
        "int8": pyarrow.list_(pyarrow.int8()),
        "large": pyarrow.large_list(pyarrow.bool_()),
        "fixed": pyarrow.list_(pyarrow.uint8(), 4),
    }
    for kind, mask in kinds.items():
        schema = pyarrow.schema(
            [("input_ids", pyarrow.list_(pyarrow.int32())), ("completion_mask", mask)]
        )
        bits = [value == 1 if kind == "large" else value for value in (0, 0, 1, 1)]
        table = pyarrow.Table.from_pylist([IDS | {"completion_mask": bits}], schema)
        path = tmp_path / f"{kind}.parquet"
        pyarrow.parquet.write_table(table, path)
        made(tmp_path / kind, {"sources": [{"path": str(path)}]})
        assert samples(tmp_path / kind) == [(0, 0, [5, 6, 7, 8], [-100, -100, 7, 8])]


def test_all_tokens_count_on_request_as_with_completion_only_loss_false(tmp_path: Path) -> None:
    path = written(tmp_path, [IDS | {"completion_mask": [0, 0, 1, 1]}])
    data = {"sources": [{"path": str(path)}], "train_on": "all"}
    made(tmp_path / "all", data)
    assert samples(tmp_path / "all") == [(0, 0, [5, 6, 7, 8], [5, 6, 7, 8])]
    with pytest.raises(ConfigError, match="labels or masks leave out 2 of 4 tokens"):
        made(tmp_path / "wrapped", {**data, "packing": "wrapped", "sequence_length": 2})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        IDS | {"completion_mask": [0, 1]},
        "completion_mask has 2 values and input_ids 4; needs one value for each id",
    ),
    (IDS | {"completion_mask": [0, 1, 2, 1]}, "completion_mask[2] = 2: needs 0, 1"),
    (IDS | {"assistant_masks": [[0, 1, 1, 1]]}, "assistant_masks[0] = [0, 1, 1, 1]: needs 0, 1"),
    (IDS | {"assistant_masks": "0111"}, "assistant_masks = '0111': needs a list of 0 and 1"),
    (IDS | {"attention_mask": [0, 1, 1, 1]}, "attention_mask[0] = 0: only ids at the end may be"),
    (IDS | {"attention_mask": [1, 0, 1, 0]}, "attention_mask[1] = 0: only ids at the end may be"),
    (
        IDS | {"labels": [5, 6, -100, -100], "completion_mask": [0, 1, 1, 1]},
        "labels[0] = 5: counts, and completion_mask[0] is 0",
    ),
    (
        IDS | {"labels": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 0]},
        "labels[3] = 8: counts, and attention_mask[3] is 0",
    ),
    (IDS | {"loss_mask": [0, 0, 1, 1]}, "set columns: {completion_mask: loss_mask} to read it"),
    (IDS | {"Loss-Mask": [[0, 0, 1, 1]]}, "Loss-Mask = [[0, 0, 1, 1]]: no reader takes a mask"),
    (IDS | {"completionMask": [0, 0, 1, 1]}, "is not the column completion_mask; set columns:"),
    (IDS | {"Labels": [-100, -100, 7, 8]}, "Labels = [-100, -100, 7, 8]: is not the column labels"),
    (IDS | {"target_ids": [-100, -100, 7, 8]}, "the ids have no labels; set columns: {labels: tar"),
    (IDS | {"weights": [0, 0, 1, 1]}, "data.objective: weighted reads weights of ids; set it"),
    (IDS | {"seq_lengths": [2, 2]}, "the ids are several samples"),
    (IDS | {"position_ids": [0, 1, 0, 1]}, "the ids are several samples"),
    (IDS | {"segment_ids": [1, 1, 2, 2]}, "the ids are several samples"),
    ({"messages": TALK, "loss_mask": [0, 1]}, "loss_mask = [0, 1]: masks go with input_ids"),
    ({"messages": TALK, "images": ["a.png"]}, "images = ['a.png']: only texts are read"),
    ({"messages": TALK, "Image": {"bytes": "x"}}, "Image = {'bytes': 'x'}: only texts are read"),
    ({"text": "a", "video": "a.mp4"}, "video = 'a.mp4': only texts are read"),
    ({"messages": TALK, "functions": "[]"}, "set columns: {tools: functions} to read it"),
    ({"messages": TALK, "Tools": [{"name": "f"}]}, "Tools = [{'name': 'f'}]: is not the column"),
    ({"prompt": "a", "completion": "b", "label": False}, "marked as a bad one"),
    ({"messages": TALK, "kto_tag": False}, "marked as a bad one"),
    (ALPACA | {"Input": "1 2"}, "Input = '1 2': is not the column input; set columns: {query: Inp"),
    (ALPACA | {"context": "1 2"}, "the instruction has no input; set columns: {query: context}"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_column_with_a_meaning_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        request_of(PLACE, fields)
    assert str(error.value).startswith(f"{PLACE}: ") and words in str(error.value)


PAIRS: list[tuple[dict[str, Any], RecordForm, str]] = [
    (TEXTS | {"question": "two and three"}, RecordForm(), "has no value in the column prompt"),
    (
        {"chosen": "five", "rejected": "four", "system": "s", "question": "two and three"},
        RecordForm(),
        "question = 'two and three': the pair has no prompt; set columns: {prompt: question}",
    ),
    (
        {"chosen": "five", "rejected": "four", "input": "2 3", "instruction": "Add."},
        RecordForm(),
        "instruction = 'Add.': the pair has no prompt; set format: alpaca to read it with an input",
    ),
    (
        TEXTS | {"input": "2 3", "instruction": "Add."},
        RecordForm(columns={"prompt": "instruction"}),
        "input = '2 3': format alpaca reads it with an instruction",
    ),
    (
        {"chosen": "five", "rejected": "four", "messages": TALK[:1]},
        RecordForm(),
        "the pair has no prompt; set format: chat and columns: {messages: messages}",
    ),
    (CHATS | {"question": "two and three"}, RecordForm(), "three': is in no turn that both"),
    (CHATS | {"prompt": "two and three"}, RecordForm(), "is in no turn that both answers begin"),
    (CHATS | {"prompt": "Hi", "images": ["a"]}, RecordForm(), "only texts are read"),
    (CHATS | {"ref_chosen_logps": -1.5}, RecordForm(), "the start computes the references"),
    (
        {"question": None, "chosen": "five", "rejected": "four"},
        RecordForm(columns={"prompt": "question"}),
        "has no value in the column question",
    ),
    (
        TEXTS | {"prompt": "a", "system": "s"},
        RecordForm(columns={"system": "system"}),
        "system = 's': columns names it as system, and the format preference has no system",
    ),
]


@pytest.mark.parametrize(("fields", "form", "words"), PAIRS, ids=range(len(PAIRS)))
def test_a_pair_without_its_prompt_is_refused(
    fields: dict[str, Any], form: RecordForm, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        pair_of(PLACE, fields, form)
    assert str(error.value).startswith(f"{PLACE}: ") and words in str(error.value)


def test_each_remedy_of_a_refusal_is_taken() -> None:
    """The columns that an error names make a request: of the column, or without it."""
    tried = 0
    for fields, form, read in [
        *((fields, RecordForm(), request_of) for fields, _ in REFUSED),
        *((fields, form, pair_of) for fields, form, _ in PAIRS),
    ]:
        with pytest.raises(ConfigError) as error:
            read(PLACE, fields, form)
        for text in str(error.value).split("columns: ")[1:]:
            part = text[: text.index("}") + 1]
            if "NAME" in part:
                part = part.replace("NAME", "question")
            columns = yaml.safe_load(part)
            kind = Format.CHAT if "messages" in columns else form.format
            changed = RecordForm(format=kind, columns={**form.columns, **columns})
            try:
                read(PLACE, fields, changed)
            except ConfigError as second:
                # Another fault of the same record may follow, but not the same one.
                assert str(second) != str(error.value), part
                assert "Loss-Mask" in part or "instruction" in part or "labels" in part, second
            tried += 1
    assert tried > 40


def test_columns_without_a_meaning_are_counted() -> None:
    unread: Counter[str] = Counter()
    for fields in (
        {"messages": TALK, "id": 1, "prompt": "Hi", "source": "web", "images": None},
        {"messages": TALK, "id": 2, "images": [], "image": "", "loss_mask": [1, 1], "score": 0.5},
        {"text": "a", "label": 3, "masked_text": "b"},
        IDS | {"special_tokens_mask": [1, 0, 0, 0], "position_ids": [0, 1, 2, 3], "length": 4},
        IDS | {"seq_lengths": [4], "weights": [1, 1, 1, 1], "attention_mask": [1, 1, 1, 1]},
        {"prompt": "a", "completion": "b", "label": True, "system": "s"},
    ):
        request_of(PLACE, fields, RecordForm(), (), unread)
    assert unread == {
        **{"id": 2, "prompt": 1, "source": 1, "loss_mask": 1, "score": 1, "label": 2},
        **{"masked_text": 1, "special_tokens_mask": 1, "position_ids": 1, "length": 1},
        **{"seq_lengths": 1, "weights": 1, "system": 1},
    }


def test_columns_that_are_left_out_are_neither_refused_nor_counted() -> None:
    unread: Counter[str] = Counter()
    form = RecordForm(columns={"images": None, "loss_mask": None, "query": None, "prompt": None})
    fields = ALPACA | {"images": ["a"], "loss_mask": [0, 1], "prompt": "x", "id": 1}
    fields["input"] = "1 2"
    form = RecordForm(columns={**form.columns, "prompt": "instruction"})
    request_of(PLACE, fields, form, (), unread)
    assert unread == {"prompt": 1, "id": 1}
    pair = pair_of(PLACE, TEXTS, RecordForm(columns={"prompt": None}))
    assert isinstance(pair, PairRequest) and pair.chosen.place == PLACE
    # A question in both answers is their prompt.
    both = {"question": "2 and 3?", "chosen": "2 and 3? Five", "rejected": "2 and 3? Four"}
    assert isinstance(pair_of(PLACE, both, RecordForm()), PairRequest)
    assert isinstance(pair_of(PLACE, CHATS | {"instruction": "Hi"}, RecordForm()), PairRequest)
    # A registry names the columns that are read, and leaves out all others.
    request_of(PLACE, {"messages": TALK, "images": ["a"]}, RecordForm(is_closed=True), (), unread)
    assert unread == {"prompt": 1, "id": 1, "images": 1}


@pytest.mark.parametrize("path", ["rows", "wrapped"])
def test_a_line_names_columns_without_a_reader(tmp_path: Path, path: str) -> None:
    odd = {f"c{n}": n for n in range(9)} | {"\x1b[2J": 1}
    records = [{"text": "some text", "id": 1}, {"text": "a second text"} | odd]
    source = {"path": str(written(tmp_path, records))}
    data = {"sources": [source]}
    if path == "wrapped":
        data = {**data, "packing": "wrapped", "sequence_length": 4}
    for cached in (False, True):
        lines: list[str] = []
        made(tmp_path / f"{path}-{cached}", data, lines.append)
        named = [line for line in lines if "reads no column" in line]
        assert named == [
            "data.sources[0]: reads no column id (1 record), c0 (1 record), c1 (1 record), c2 (1"
            " record), c3 (1 record), c4 (1 record), c5 (1 record), c6 (1 record) and 3 more"
        ]


def test_names_of_columns_are_known(tmp_path: Path) -> None:
    read = {*conversation._DEFAULTS, *conversation._ALPACA, *ready_ids.NAMES}
    read |= {weights.WEIGHT, weights.WEIGHTS, "role", "content"}
    assert set(COLUMN_NAMES) == read
    path = str(written(tmp_path, [{"question": "a", "completion": "b"}]))
    with pytest.raises(ConfigError, match="no format reads the name 'question'"):
        made(tmp_path / "a", {"sources": [{"path": path, "columns": {"question": "prompt"}}]})
    made(tmp_path / "b", {"sources": [{"path": path, "columns": {"prompt": "question"}}]})
    meta = json.loads((tmp_path / "b/data/meta.json").read_text())
    assert meta["train"]["tally"]["unread"] == {}
