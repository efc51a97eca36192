"""Makes ``masks.json`` of this folder with TRL: digests of ids and labels of 500 conversations.

``PYTHONPATH=. PYTHON -m tests.data.chat.masks FOLDER OUT [TEMPLATES]`` runs in an environment with
TRL: its ``SFTTrainer`` prepares the conversations. FOLDER has the tokenizer. TEMPLATES is a
folder of ``*.jinja``; without one, the templates of FOLDER are taken.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.data.chat.conversations import cases, pair

REFUSED = "-"
"""The digest of a conversation that a trainer refuses."""
MODES = ("assistant", "completion")
Record = Mapping[str, Any]


def digest(ids: Sequence[int], labels: Sequence[int]) -> str:
    """Returns 6 hexadecimal digits of ids and labels."""
    text = json.dumps([list(ids), list(labels)])
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def records(mode: str, *, ours: bool) -> list[tuple[str, Record]]:
    """Returns kind and record of the conversations of a mode: ``assistant`` takes messages, and
    ``completion`` takes prompt and completion.
    """
    chosen: list[tuple[str, Record]] = []
    for case in cases():
        record: Record | None = case.ours if ours else case.theirs
        if mode == "completion":
            record = pair(record or {})
        if record is not None:
            chosen.append((case.kind, record))
    return chosen


class Trainer:
    """TRL's trainer with one template; prepares records."""

    def __init__(self, folder: Path, template: str, out: str) -> None:
        from tokenizers import Tokenizer
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")),
            chat_template=template, eos_token="<|endoftext|>", bos_token="<s>", pad_token="<s>",
        )  # fmt: skip
        config = LlamaConfig(vocab_size=512, hidden_size=8, intermediate_size=8,
                             num_hidden_layers=1, num_attention_heads=1,
                             num_key_value_heads=1)  # fmt: skip
        self._model = LlamaForCausalLM(config)
        self._out = out

    def prepared(self, given: Sequence[Record], mode: str) -> list[tuple[list[int], list[int]]]:
        """Returns ids and labels of records, which TRL prepares in one data set."""
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(
            output_dir=self._out, use_cpu=True, report_to=[], max_length=None, disable_tqdm=True,
            assistant_only_loss=mode == "assistant", shuffle_dataset=False, bf16=False,
        )  # fmt: skip
        made = SFTTrainer(
            self._model,
            args=arguments,
            train_dataset=Dataset.from_list([dict(record) for record in given]),
            processing_class=self._tokenizer,
        ).train_dataset
        return [(row["input_ids"], row["labels"]) for row in made]

    def digests(self, given: Sequence[Record], mode: str) -> Iterator[str]:
        """Yields the digest of each record. A group with a refused record is halved."""
        try:
            rows = self.prepared(given, mode)
        except Exception:
            if len(given) == 1:
                yield REFUSED
                return
            middle = len(given) // 2
            yield from self.digests(given[:middle], mode)
            yield from self.digests(given[middle:], mode)
            return
        yield from (digest(ids, labels) for ids, labels in rows)


def digests(folder: Path, template: str) -> dict[str, str]:
    """Returns the digests of all conversations by mode, joined by spaces."""
    made = {}
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(folder, template, out)
        for mode in MODES:
            groups = groupby(records(mode, ours=False), key=lambda item: item[0])
            made[mode] = " ".join(
                text
                for _, group in groups
                for text in trainer.digests([record for _, record in group], mode)
            )
    return made


def main(folder: Path, out: Path, shipped: Path | None) -> None:
    """Writes the digests of all templates."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    templates: dict[str, str] = json.loads((folder / "templates.json").read_text(encoding="utf-8"))
    if shipped is not None:
        paths = sorted(shipped.glob("*.jinja"))
        templates = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    content: dict[str, Any] = {"trl": trl.__version__, "templates": {}}
    for name, text in templates.items():
        content["templates"][name] = digests(folder, text)
        print(name, flush=True)
    out.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
