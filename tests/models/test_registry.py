"""LLaMA-Factory's registry as a source: entries as its examples have them, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.data import SourceConfig
from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from penstock.models.data.chat.conversation import pair_of, request_of
from penstock.models.data.chat.requests import (
    ChatRequest,
    Format,
    PairRequest,
    RecordForm,
    Request,
    TextRequest,
)
from penstock.models.data.rows.registry import registered
from tests.models.test_prepare import LLAMA
from tests.models.test_rows import made, opened, samples

SHAREGPT = {
    "file_name": "glaive.json",
    "formatting": "sharegpt",
    "columns": {"messages": "conversations", "tools": "tools"},
}
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def registry(folder: Path, **entries: Any) -> Path:
    """A registry with these entries."""
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def resolved(folder: Path, entry: Any, **keys: Any) -> SourceConfig:
    """The source that an entry stands for."""
    path = registry(folder, it=entry)
    source = SourceConfig(registry=str(path), name="it", **keys)
    return registered("data.sources[0]", source)


def request(folder: Path, entry: Any, record: dict[str, Any]) -> Request:
    """A record's request, read as an entry says."""
    source = resolved(folder, entry)
    form = RecordForm(format=Format(source.format), columns=source.columns, roles=source.roles)
    return request_of("it:1", record, form)


def turns(folder: Path, entry: Any, record: dict[str, Any]) -> list[tuple[str, Any]]:
    """Role and content of the turns of a record."""
    chat = request(folder, entry, record)
    assert isinstance(chat, ChatRequest)
    return [(turn.role, turn.fields.get("content")) for turn in chat.turns]


def test_alpaca_without_columns_reads_three_columns(tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "1 1", "output": "2", "system": "S", "tools": "[]"}
    assert turns(tmp_path, {"file_name": "a.json"}, record | {"history": [["a", "b"]]}) == [
        ("user", "Add\n1 1"),
        ("assistant", "2"),
    ]


def test_alpaca_with_columns_reads_those_alone(tmp_path: Path) -> None:
    columns = {"prompt": "q", "response": "a", "system": "rules", "history": "before"}
    record = {"q": "Q", "a": "A", "rules": "R", "before": [["x", "y"]], "input": "no"}
    assert turns(tmp_path, {"file_name": "a.json", "columns": columns}, record) == [
        ("system", "R"),
        ("user", "x"),
        ("assistant", "y"),
        ("user", "Q"),
        ("assistant", "A"),
    ]


def test_a_prompt_alone_is_text(tmp_path: Path) -> None:
    text = request(tmp_path, {"file_name": "c4.json", "columns": {"prompt": "text"}}, {"text": "T"})
    assert isinstance(text, TextRequest) and text.text == "T"


def test_sharegpt_has_its_roles_and_no_other_columns(tmp_path: Path) -> None:
    calls = '{"name": "f", "arguments": {}}'
    messages = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": calls},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "Three"},
    ]
    record = {"conversations": messages, "system": "S", "tools": '[{"name": "f"}]'}
    entry = {"file_name": "x.json", "formatting": "sharegpt"}
    assert turns(tmp_path, entry, record) == [
        ("user", "Hi"),
        ("assistant", None),
        ("tool", "3"),
        ("assistant", "Three"),
    ]
    chat = request(tmp_path, entry, record)
    assert isinstance(chat, ChatRequest) and chat.tools is None
    chat = request(tmp_path, SHAREGPT, record)
    assert isinstance(chat, ChatRequest) and chat.tools == ({"name": "f"},)


def test_tags_name_keys_and_roles(tmp_path: Path) -> None:
    tags = {
        "role_tag": "speaker",
        "content_tag": "text",
        "user_tag": "USER",
        "assistant_tag": "BOT",
        "system_tag": "BOSS",
    }
    entry = {
        "file_name": "m.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog", "system": "rules"},
        "tags": tags,
    }
    dialog = [
        {"speaker": "USER", "text": "Hi", "role": "ignored", "value": "ignored"},
        {"speaker": "BOT", "text": "Hello"},
    ]
    record = {"dialog": dialog, "rules": "Be brief"}
    assert turns(tmp_path, entry, record) == [
        ("system", "Be brief"),
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


def test_openai_messages(tmp_path: Path) -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    entry = {
        "file_name": "o.json",
        "formatting": "openai",
        "columns": {"messages": "messages"},
        "tags": tags | {"assistant_tag": "assistant"},
    }
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert turns(tmp_path, entry, {"messages": messages}) == [("user", "Hi"), ("assistant", "Yo")]


def answers(folder: Path, entry: Any, record: dict[str, Any]) -> list[list[tuple[str, Any]]]:
    """Role and content of the turns of both answers, with their prompt first."""
    path = registry(folder, it=entry)
    source = SourceConfig(registry=str(path), name="it")
    source = registered("data.sources[0]", source, pairs=True)
    form = RecordForm(format=Format(source.format), columns=source.columns, roles=source.roles)
    pair = pair_of("it:1", record, form)
    assert isinstance(pair, PairRequest)
    listed = []
    for chat in (pair.chosen, pair.rejected):
        assert isinstance(chat, ChatRequest) and chat.prompt_turns == len(chat.turns) - 1
        listed.append([(turn.role, turn.fields.get("content")) for turn in chat.turns])
    return listed


ALPACA_PAIRS = {
    "file_name": "a.json",
    "ranking": True,
    "columns": {
        **{"prompt": "instruction", "query": "input", "system": "rules"},
        **{"chosen": "good", "rejected": "bad", "history": "before"},
    },
}
SHAREGPT_PAIRS = {
    "file_name": "s.json",
    "formatting": "sharegpt",
    "ranking": True,
    "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}


def test_pairs_of_alpaca(tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "1 1", "good": "2", "bad": "3", "rules": "R"}
    prompt = [("system", "R"), ("user", "x"), ("assistant", "y"), ("user", "Add\n1 1")]
    assert answers(tmp_path, ALPACA_PAIRS, record | {"before": [["x", "y"]]}) == [
        [*prompt, ("assistant", "2")],
        [*prompt, ("assistant", "3")],
    ]


def test_pairs_of_sharegpt(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "conversations": [*TALK, {"from": "human", "value": "And?"}],
        "chosen": {"from": "gpt", "value": "Fine"},
        "rejected": {"from": "gpt", "value": "Bad"},
    }
    prompt = [("user", "Hi"), ("assistant", "Hello"), ("user", "And?")]
    expected = [[*prompt, ("assistant", "Fine")], [*prompt, ("assistant", "Bad")]]
    assert answers(tmp_path, SHAREGPT_PAIRS, record) == expected
    tags = {"role_tag": "who", "content_tag": "text", "assistant_tag": "bot", "user_tag": "me"}
    words = {"gpt": "bot", "human": "me"}

    def tagged(message: dict[str, str]) -> dict[str, str]:
        return {"who": words[message["from"]], "text": message["value"]}

    other: dict[str, Any] = {name: tagged(record[name]) for name in ("chosen", "rejected")}
    other["conversations"] = [tagged(message) for message in record["conversations"]]
    assert answers(tmp_path, {**SHAREGPT_PAIRS, "tags": tags}, other) == expected


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (None, "has no value in the column chosen"),
        ({"from": "human", "value": "x"}, "needs a text, or one message of the assistant"),
        ([*TALK], "needs a text, or one message of the assistant"),
        (3, "chosen = 3: needs a list"),
    ],
)
def test_other_answers_are_refused(tmp_path: Path, chosen: Any, words: str) -> None:
    record = {"conversations": TALK[:1], "rejected": {"from": "gpt", "value": "Bad"}}
    with pytest.raises(ConfigError, match=words):
        answers(tmp_path, SHAREGPT_PAIRS, record | {"chosen": chosen})


def test_pairs_of_a_registry_are_rows(tmp_path: Path) -> None:
    path = registry(tmp_path, it=ALPACA_PAIRS)
    record = {"instruction": "Add", "input": "", "good": "2", "bad": "3"}
    (tmp_path / "a.json").write_text(json.dumps([record]))
    keys = {"sources": [{"registry": str(path), "name": "it"}], "objective": "dpo"}
    made(tmp_path / "run", {**keys, "sequence_length": 96}, train={"global_batch": 2})
    rows = [bytes(i for i in ids if i < 256).decode() for _, _, ids, _ in samples(tmp_path / "run")]
    start = "<|im_start|>user\nAdd<|im_end|>\n<|im_start|>assistant\n"
    assert rows == [f"{start}{answer}<|im_end|>\n" for answer in "23"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranking": False}, "ranking = False: data.objective dpo, orpo and simpo read pairs"),
        ({"columns": {"prompt": "instruction", "chosen": "good"}}, "columns has no rejected"),
        ({"columns": None}, "ranking = True: columns has no chosen"),
    ],
)
def test_entries_without_pairs_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        answers(tmp_path, {**ALPACA_PAIRS, **change}, {})


@pytest.mark.parametrize(("limit", "samples_", "kept"), [(5, 3, 3), (2, 3, 2), (None, 7, 7)])
def test_the_smaller_limit_holds(
    tmp_path: Path, limit: int | None, samples_: int, kept: int
) -> None:
    entry = {"file_name": "a.json", "num_samples": samples_, "folder": "x", "subset": "y"}
    assert resolved(tmp_path, entry, limit=limit).limit == kept


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"hf_hub_url": "org/set"}, "hf download org/set --repo-type dataset --local-dir"),
        ({"ms_hub_url": "org/set"}, "modelscope download --dataset org/set"),
        (
            {"hf_hub_url": "a/b", "ms_hub_url": "c/d", "file_name": "x.json"},
            "hf download a/b --repo-type dataset",
        ),
        ({"script_url": "x"}, "script_url = 'x'"),
        ({"cloud_file_name": "s3://x"}, "cloud_file_name = 's3://x'"),
        ({}, "has no file_name"),
        ({"file_name": 3}, "file_name = 3: needs a text"),
        ({"file_name": "a.json", "split": "test"}, "split = 'test'"),
        ({"file_name": "a.json", "split": "train[:x]"}, "split = 'train[:x]': accepted are"),
        ({"file_name": "a.json", "ranking": True}, "ranking = True: pairs of answers"),
        ({"file_name": "a.json", "formatting": "vicuna"}, "accepted are alpaca, sharegpt"),
        ({"file_name": "a.json", "columns": ["x"]}, "columns = ['x']: needs an object"),
        ({"file_name": "a.json", "columns": {"prompt": 1}}, "columns.prompt = 1"),
        ({"file_name": "a.json", "columns": {}}, "neither prompt nor response"),
        ({"file_name": "a.json", "columns": {"images": "i"}}, "columns.images = 'i'"),
        ({"file_name": "a.json", "columns": {"kto_tag": "l"}}, "columns.kto_tag = 'l'"),
        (
            {"file_name": "a.json", "columns": {"prompt": "p", "query": "q"}},
            "columns.query = 'q': needs a column for response",
        ),
        ({"file_name": "a.json", "formatting": "sharegpt", "columns": {}}, "has no messages"),
        ({"file_name": "a.json", "formatting": "sharegpt", "tags": 1}, "tags = 1"),
        ({"file_name": "a.json", "num_samples": 0}, "num_samples = 0"),
        ({"file_name": "a.json", "num_samples": True}, "num_samples = True"),
        ([], "it = []: needs an object"),
    ],
)
def test_wrong_entries_are_refused(tmp_path: Path, entry: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, entry)
    assert words in str(caught.value)
    assert str(caught.value).startswith("data.sources[0]")
    assert "dataset_info.json" in str(caught.value)


def test_other_names_and_files_are_refused(tmp_path: Path) -> None:
    path = registry(tmp_path, one={}, two={})
    with pytest.raises(ConfigError, match=r"data.sources\[0\].name = 'three': .* one, two"):
        registered("data.sources[0]", SourceConfig(registry=str(path), name="three"))
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="holds \\[1\\]; needs an object"):
        registered("data.sources[0]", SourceConfig(registry=str(path), name="one"))
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        registered("data.sources[0]", SourceConfig(registry=str(path), name="one"))
    with pytest.raises(ConfigError, match=r"cannot read it: .*folder"):
        registered("data.sources[0]", SourceConfig(registry=str(tmp_path), name="one"))


def test_the_file_of_a_saved_dataset_is_no_registry(tmp_path: Path) -> None:
    path = registry(tmp_path, features={})
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="save_to_disk"):
        registered("data.sources[0]", SourceConfig(registry=str(path), name="features"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "a.json", "registry": "r.json", "name": "n"}, "exactly one of path and registry"),
        ({}, "exactly one of path and registry"),
        ({"registry": "r.json"}, "registry and name go together"),
        ({"path": "a.json", "name": "n"}, "registry and name go together"),
        ({"registry": "r.json", "name": "n", "format": "chat"}, "format: the entry 'n'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"hf": LLAMA}, "data": {"sources": [source]}})
    assert words in str(caught.value)


def test_a_run_takes_rows_of_a_registry(tmp_path: Path) -> None:
    """Files lie relative to the registry, and another entry makes another fingerprint."""
    data = tmp_path / "data"
    data.mkdir()
    records = [{"conversations": TALK, "tools": None} for _ in range(3)]
    (data / "glaive.json").write_text(json.dumps(records))
    path = registry(data, it=SHAREGPT)
    source = {"registry": str(path), "name": "it", "limit": 2}
    made(tmp_path / "run", {"sources": [source]})
    plain = {"path": str(data / "glaive.json"), "limit": 2, "format": "chat"}
    made(tmp_path / "plain", {"sources": [plain]})
    _, entry = opened(tmp_path / "run")
    assert entry["tally"]["records"] == 2
    assert samples(tmp_path / "run") == samples(tmp_path / "plain")

    (data / "glaive.json").unlink()
    with pytest.raises(ConfigError, match=r"data.sources\[0\].registry = '.*glaive.json': no such"):
        made(tmp_path / "next", {"sources": [source]})
