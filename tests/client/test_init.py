"""``penstock init``: the written configuration is prepared and trained unedited."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.client.cli import example_names
from penstock.client.main import app
from penstock.client.planning import starting
from penstock.client.planning.data_rows import read_rows
from penstock.config.schema import load_config
from tests.folders import save_model

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DATE_TEMPLATE = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model in ``models/tiny``."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "models" / "tiny", "llama", max_position_embeddings=512, **LLAMA)
    return tmp_path


def ran(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    result = CliRunner().invoke(app, [*words])
    return result.exit_code, result.stdout, result.stderr


def chats(number: int, words: int = 12) -> str:
    """JSON lines of conversations."""
    talks = (
        [
            {"role": "user", "content": f"Where does river {n} go?"},
            {"role": "assistant", "content": f"River {n} goes {'down ' * (n % words)}to the sea."},
        ]
        for n in range(number)
    )
    return "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)


def summary(config: str) -> dict[str, Any]:
    """The summary of ``penstock data``."""
    code, out, err = ran("data", config, "--json", "--rows", "0:1")
    assert code == 0, err
    return dict(json.loads(out.splitlines()[0]))


def init(data: str, *options: str) -> str:
    """The written text."""
    code, out, err = ran("init", "--model", "models/tiny", "--data", data, *options)
    assert code == 0, err
    name = options[-1] if options else "tiny.yaml"
    assert f"penstock data {name} shows the rows" in out
    assert f"start with: penstock train {name}" in out
    return Path(name).read_text()


def test_a_configuration_for_conversations(folder: Path) -> None:
    (folder / "chats.jsonl").write_text(chats(200))
    text = init("chats.jsonl", "--out", "mine.yaml")
    config = load_config(Path("mine.yaml"))
    data = summary("mine.yaml")
    longest = data["lengths"]["max"]
    assert (config.run.name, str(config.model.path)) == ("mine", "models/tiny")
    assert config.data.sequence_length == 256 >= longest and data["truncated"] == 0
    assert config.train.epochs == 3 and data["rows"] >= 4 * config.train.global_batch
    assert f"# passes over the data: {data['steps']:,} steps" in text
    assert f"# rows of a step; a pass has {data['rows']:,}" in text
    assert f"the longest sample has {longest:,}, the model takes 512" in text
    assert "200 records, 200 samples" in text and "memory: weights and optimizer take" in text
    assert config.optimizer.lr == 2e-5 and "cluster:" in text


def test_large_data_are_read_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last record would take a longer row, and is no JSON, so that it is never read."""
    monkeypatch.setattr(starting, "SAMPLE_BYTES", 20_000)
    prepared: list[int] = []

    def counted(*words: Any, **keys: Any) -> None:
        read_rows(*words, **keys)
        prepared.append(words[0].data.sequence_length)

    monkeypatch.setattr(starting, "read_rows", counted)
    (folder / "chats.jsonl").write_text(chats(2000) + '{"messages": [')
    text = init("chats.jsonl", "--out", "mine.yaml")
    read = int(re.search(r"the first part was read: (\d+) records", text)[1])  # type: ignore[index]
    assert 100 < read < 200 and f"longest sample of the first {read} records has" in text
    assert "longer ones lose their end, see data.too_long" in text
    assert "a pass has more than" in text and "passes over the data: more than" in text
    config = load_config(Path("mine.yaml"))
    assert (config.data.path, config.data.sequence_length) == ("chats.jsonl", 256)
    assert prepared == [512, 256]
    (folder / "chats.jsonl").write_text('{"messages": 3}\n' * 2000)
    code, _, err = ran("init", "--model", "models/tiny", "--data", "chats.jsonl", "--out", "b.yaml")
    assert code == 2 and "the first records of chats.jsonl, line 1" in err


def test_a_text_is_sampled_from_its_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "SAMPLE_BYTES", 1000)
    for name in "ab":
        (folder / f"{name}.txt").write_text("Rivers run down to the sea. " * 200)
    text = init("*.txt", "--out", "mine.yaml")
    tokens = {int(n.replace(",", "")) for n in re.findall(r"([\d,]+) tokens of text", text)}
    assert "the first part was read: " in text and "the text has more than " in text
    assert tokens and max(tokens) < summary("mine.yaml")["tokens"]


@pytest.mark.slow
def test_a_configuration_for_text_trains_and_exports(folder: Path) -> None:
    """A text of few rows: shorter ones, so that a pass has several steps."""
    (folder / "text.txt").write_text("Rivers run down to the sea, and rain comes back. " * 200)
    init("text.txt")
    config = load_config(Path("tiny.yaml"))
    assert config.train.epochs == 1 and config.data.sequence_length < 512
    code, out, err = ran("train", "tiny.yaml")
    assert code == 0, f"{out}{err}"
    code, _, err = ran("export", "runs/tiny", "--format", "hf", "out")
    assert code == 0 and (folder / "out" / "model.safetensors").is_file(), err


@pytest.mark.slow
def test_templates_without_text_or_with_a_date(folder: Path) -> None:
    (folder / "chats.jsonl").write_text(chats(30, words=200))
    template = folder / "models" / "tiny" / "chat_template.jinja"
    template.write_text(DATE_TEMPLATE)
    text = init("chats.jsonl")
    kwargs = load_config(Path("tiny.yaml")).data.chat_template_kwargs
    assert set(kwargs) == {"date_string"} and "this fixes it" in text
    _, _, err = ran("data", "tiny.yaml")
    assert "writes the date" not in err
    _, _, err = ran("data", "tiny.yaml", "--set", "data.chat_template_kwargs={}")
    assert "the template writes the date of the day" in err and "date_string" in err
    template.unlink()
    init("chats.jsonl", "--out", "other.yaml")
    assert load_config(Path("other.yaml")).data.chat_template == "chatml"
    summary("other.yaml")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--model", "models/tiny"), "--model and --data go together; give both"),
        (("--data", "a.txt"), "--model and --data go together; give both"),
        (
            ("--model", "Qwen/Qwen2.5-0.5B", "--data", "a.txt"),
            "no such folder; give a model folder (to get this model from the Hub: hf download"
            " Qwen/Qwen2.5-0.5B --local-dir Qwen/Qwen2.5-0.5B)",
        ),
        (("--model", "models", "--data", "a.txt"), "has no config.json"),
        (("--model", "bare", "--data", "a.txt"), "has no weights (*.safetensors); fetch the whole"),
        (("--model", "damaged", "--data", "a.txt"), "config.json is damaged"),
        (
            ("--model", "bare", "--data", "a.txt", "--example", "chat"),
            "give --example, or --model with --data",
        ),
        (("--model", "m", "--data", "a.txt", "--out", "a.txt"), "a.txt: exists; name another file"),
    ],
)
def test_refusals_write_nothing(
    words: tuple[str, ...], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for name, text in (("bare", "{}"), ("damaged", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "models").mkdir()
    code, _, err = ran("init", *words)
    assert code == 2 and error in err
    assert not list(tmp_path.glob("*.yaml")) and (tmp_path / "a.txt").read_text() == "text"


@pytest.mark.slow
def test_data_of_the_hub_and_unreadable_data(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"messages": [\n')
    for data, error in (
        ("tatsu-lab/alpaca", "hf download tatsu-lab/alpaca --repo-type dataset"),
        ("bad.jsonl", "bad.jsonl, line 1"),
    ):
        code, _, err = ran("init", "--model", "models/tiny", "--data", data)
        assert code == 2 and error in err and "internal error" not in err
    assert not list(folder.glob("*.yaml"))


def test_examples_come_with_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"chat", "pretrain"} <= set(example_names())
    for name, data in (
        ("chat", "chat.jsonl"),
        ("pretrain", "texts.parquet"),
        ("adapters", "chat.jsonl"),
    ):
        assert ran("init", "--example", name)[0] == 0
        text = Path(f"{name}.yaml").read_text()
        assert "examples/" not in text and Path(data).stat().st_size > 1000
        config = load_config(Path(f"{name}.yaml"))
        paths = [source.path for source in config.data.sources] or [config.data.path]
        assert paths == [data]
    Path("chat.yaml").unlink()
    assert ran("init", "--example", "chat")[0] == 0, "the same data are there already"
    Path("chat.yaml").unlink()
    Path("chat.jsonl").write_text("mine")
    code, _, err = ran("init", "--example", "chat")
    assert code == 2 and "chat.jsonl: exists, with other content" in err
    assert Path("chat.jsonl").read_text() == "mine" and not Path("chat.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counted"), [("chat", True), ("pretrain", False)])
def test_examples_train(
    name: str, counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ran("init", "--example", name)[0] == 0
    data = summary(f"{name}.yaml")
    assert (data["counted_tokens"] < data["tokens"]) is counted
    code, out, err = ran("train", f"{name}.yaml")
    assert code == 0, f"{out}{err}"
    metrics = Path(f"runs/{name}/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == data["steps"] and losses[-1] < losses[0]


@pytest.mark.slow
def test_the_example_of_adapters_trains_that_of_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chat", "adapters"):
        assert ran("init", "--example", name)[0] == 0
    for words in (
        ["train", "chat.yaml"],
        ["export", "runs/chat", "models/chat"],
        ["train", "adapters.yaml"],
        ["export", "runs/adapters", "out", "--format", "peft", "--verify"],
    ):
        code, out, err = ran(*words)
        assert code == 0, f"{out}{err}"
    assert Path("out/adapter_model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_pairs_take_the_objective_that_is_named(objective: str, folder: Path) -> None:
    pairs = ({"prompt": f"Is {n} odd?", "chosen": "Yes.", "rejected": "No."} for n in range(64))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    init("pairs.jsonl", "--objective", objective, "--out", "mine.yaml")
    config = load_config(Path("mine.yaml"))
    assert config.data.objective == objective and config.trains_on_pairs
    assert (config.train.epochs, config.optimizer.lr) == (1, 1e-6)


@pytest.mark.slow
def test_adapters_pairs_and_an_evaluation(folder: Path) -> None:
    """Pairs are known by their columns; the files are trained unedited."""
    pairs = ({"prompt": f"Is {n} odd?", "chosen": "Yes.", "rejected": "No."} for n in range(64))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "held-out.jsonl").write_text((folder / "pairs.jsonl").read_text())
    text = init("pairs.jsonl", "--lora", "--eval", "held-out.jsonl", "--out", "mine.yaml")
    config = load_config(Path("mine.yaml"))
    assert (config.data.objective, config.train.epochs, config.optimizer.lr) == ("dpo", 1, 1e-5)
    assert config.adapter is not None and (config.adapter.r, config.adapter.alpha) == (16, 32)
    assert [(each.name, each.path) for each in config.eval.sets] == [("held-out", "held-out.jsonl")]
    head = "penstock init --model models/tiny --data pairs.jsonl --lora --eval held-out.jsonl"
    assert f"# Made by {head}\n" in text
    code, out, err = ran("train", "mine.yaml")
    assert code == 0, f"{out}{err}"
    assert "evaluation of held-out loss" in out and "over 64 pairs" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--objective", "kto"), "--objective kto: accepted are next-token, dpo, orpo, simpo"),
        (("--eval", "no.jsonl"), "--eval no.jsonl: no such file or folder"),
    ],
)
def test_options_of_init_are_checked_first(words: tuple[str, ...], error: str) -> None:
    code, _, err = ran("init", "--model", "models/no", "--data", "@stdlib", *words)
    assert (code, err) == (2, f"penstock: {error}\n")
    code, _, err = ran("init", "--lora")
    assert code == 2 and "--model and --data are missing; give both" in err
