"""Makes the files of this folder with TRL: ids and labels that its ``SFTTrainer`` prepares.

``PYTHONPATH=. PYTHON -m tests.data.chat.make FOLDER [NAME ...]`` runs in an environment with TRL.
``NAME`` are templates that TRL ships; FOLDER receives tokenizer.json, templates.json and trl.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "phi3", "phi3_5")

SPECIAL = (
    *("<|endoftext|>", "<s>", "<bos>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>"),
    *("<|system|>", "<|assistant|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")

SIMPLE = """{% for message in messages %}{% if message.role == 'assistant' %}
[A] {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}[{{ message.role | upper }}] {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}[A] {% endif %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather <b>of</b> a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Returns a conversation of user and assistant in turns."""
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return first + turns


def conversations() -> Iterator[tuple[list[dict[str, Any]], list[Any] | None]]:
    """Yields messages and tools."""
    odd = (
        "",
        " ",
        "\n\n  \t",
        "naïve café",
        "日本語のテキスト",
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "e\u0301\u0323",
        "\u202eabc",
    )
    for text in odd:
        yield talk(f"Say {text}", text), None
        yield talk(text, "yes", "again", f"{text} no", system="Be brief."), None
    yield talk("Hello", "Hi!"), None
    yield talk("a", "b", "c", "d", "e", "f"), None
    yield talk("a", "b", "c"), None
    yield talk("one", "two", system=""), None
    yield talk(" spaces ", "  around  ", "\n", "lines\nof\n\ntext\n"), None
    middle = talk("Hello", "Hi!")
    yield [*middle, {"role": "system", "content": "Now be rude."}, *talk("And?", "No.")], None
    yield [*talk("Go", "One."), {"role": "assistant", "content": "Two."}], None
    yield [{"role": "assistant", "content": "I begin."}, *talk("Fine", "Good.")], None
    yield talk("Why?", "<think>\nLet me see.\n</think>\n\nBecause.", "So?", "Yes."), None
    thinking = {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}
    yield [{"role": "user", "content": "2 + 2?"}, thinking, *talk("Sure?", "Yes.")], None
    yield [*talk("Hello", "Hi", "2 + 2?"), thinking], None
    yield talk("Weather?", "Where?"), [TOOL]
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "tool", "content": '{"sky": "grey"}'}
    asks = {"role": "user", "content": "Weather in Köln?"}
    yield [asks, call, answer, {"role": "assistant", "content": "It is grey."}], [TOOL]
    both = {"role": "assistant", "content": "I ask.", "tool_calls": [CALL, CALL]}
    end = {"role": "assistant", "content": "Grey twice."}
    yield [asks, both, answer, answer, end, *talk("Thanks", "Welcome.")], [TOOL, TOOL]
    yield [asks, {"role": "assistant", "tool_calls": [CALL]}], [TOOL]


def records() -> Iterator[dict[str, Any]]:
    """Yields records with the mode of TRL under ``mode``."""
    for messages, tools in conversations():
        more = {} if tools is None else {"tools": tools}
        yield {"mode": "assistant", "messages": messages, **more}
        yield {"mode": "all", "messages": messages, **more}
        if messages[-1]["role"] == "assistant" and len(messages) > 1:
            pair = {"prompt": messages[:-1], "completion": messages[-1:], **more}
            yield {"mode": "completion", **pair}
            yield {"mode": "both", **pair}
    for prompt, completion in (
        ("Q: 1\nA:", " 1"),
        ("a", "b"),
        ("", "x"),
        ("ab ", ""),
        ("日", "本"),
    ):
        yield {"mode": "plain", "prompt": prompt, "completion": completion}
    for text in ("Hello, world", "ends<|endoftext|>", "\n"):
        yield {"mode": "plain", "text": text}


def make_tokenizer(folder: Path) -> Any:
    """Writes a byte-level tokenizer trained on the records, and returns it as transformers opens
    it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    texts = [json.dumps(record, ensure_ascii=False) for record in records()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<s>", pad_token="<s>"
    )


def prepared(record: dict[str, Any], template: str, tokenizer: Any, model: Any, out: str) -> Any:
    """Returns ids and counted places as TRL prepares them, or its error."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    fields = {key: value for key, value in record.items() if key != "mode"}
    if "tools" in fields:
        fields["tools"] = json.dumps(fields["tools"])
    tokenizer.chat_template = template
    arguments = SFTConfig(
        output_dir=out, use_cpu=True, report_to=[], max_length=None, shuffle_dataset=False,
        assistant_only_loss=record["mode"] in ("assistant", "both"), disable_tqdm=True,
    )  # fmt: skip
    try:
        data = Dataset.from_list([fields])
        made = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
        row = made.train_dataset[0]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:120]}
    return {"ids": row["input_ids"], "counts": runs(row["labels"])}


def runs(labels: list[int]) -> list[list[int]]:
    """Returns the first and the last place but one of each run of labels that count."""
    edges = [False, *(label != -100 for label in labels), False]
    places = [n for n in range(len(labels) + 1) if edges[n] != edges[n + 1]]
    return [places[n : n + 2] for n in range(0, len(places), 2)]


def main(folder: Path, names: list[str]) -> None:
    """Writes the files."""
    import datasets
    import trl
    from transformers import LlamaConfig, LlamaForCausalLM

    datasets.disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    shipped = Path(trl.__file__).parent / "chat_templates"
    texts = {name: (shipped / f"{name}.jinja").read_text(encoding="utf-8") for name in names}
    texts["simple"] = SIMPLE
    tokenizer = make_tokenizer(folder)
    config = LlamaConfig(vocab_size=512, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    model = LlamaForCausalLM(config)
    cases = list(records())
    expected: dict[str, Any] = {}
    for name, text in texts.items():
        expected[name] = [
            prepared(record, text, tokenizer, model, str(folder / "out"))
            for record in cases
            if record["mode"] != "plain" or name == "simple"
        ]
    for name, content in (
        ("templates.json", texts),
        ("trl.json", {"trl": trl.__version__, "records": cases, "expected": expected}),
    ):
        text = json.dumps(content, separators=(",", ":"))
        (folder / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(NAMES))
