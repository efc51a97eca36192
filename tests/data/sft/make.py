"""Makes ``losses.json`` of this folder with TRL: the losses of its ``SFTTrainer`` on a tiny model.

``PYTHONPATH=. PYTHON -m tests.data.sft.make FOLDER`` runs in an environment with TRL. Model,
records and settings are those of this file, so that a run of Penstock repeats them without TRL.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

CHAT = Path(__file__).parents[1] / "chat"
SPECIAL = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "pad_token": "<s>"}
TEMPLATES = ("qwen2_5", "qwen3", "phi3", "simple")
STEPS, BATCH, LENGTH = 50, 4, 224
RATE, DECAY, WARMUP = 2e-3, 0.01, 5
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
WORDS = "river stone naïve 日本 blue seven <b>x</b> walk light 👩‍👧 tea".split()


def drawn(seed: int) -> np.random.PCG64:
    """Returns random bits that are the same in every NumPy."""
    return np.random.PCG64(seed)


def records(kind: str) -> list[dict[str, Any]]:
    """Returns records: conversations (``messages``), or a ``prompt`` with its ``completion``."""
    bits, made = drawn(5), []
    for number in range(600):
        numbers = bits.random_raw(64).tolist()
        texts = [
            " ".join(
                WORDS[n % len(WORDS)] for n in numbers[turn * 9 : turn * 9 + 1 + numbers[turn] % 9]
            )
            for turn in range(4)
        ]
        talk = [
            {"role": ("user", "assistant")[turn % 2], "content": text}
            for turn, text in enumerate(texts[: 2 + 2 * (number % 2)])
        ]
        if kind == "messages":
            made.append({"messages": talk})
        else:
            made.append({"prompt": talk[:-1], "completion": talk[-1:]})
    return made


def model(vocab_size: int) -> LlamaForCausalLM:
    """Returns the model with weights between -0.1 and 0.1, and norms of one."""
    config = LlamaConfig(vocab_size=vocab_size, **SIZES)
    made = LlamaForCausalLM(config)
    bits = drawn(11)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            raw = np.asarray(bits.random_raw(parameter.numel()), dtype=np.uint64) >> np.uint64(40)
            values = (raw.astype(np.float32) / 2**24 - 0.5) * 0.2
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
    return made


def save(folder: Path, template: str) -> None:
    """Writes model and tokenizer as the Hub has them."""
    disable_progress_bar()  # the first one starts a thread for the rest of the process
    folder.mkdir(parents=True, exist_ok=True)
    text = (CHAT / "tokenizer.json").read_text(encoding="utf-8")
    size = max(json.loads(text)["model"]["vocab"].values())
    added = [token["id"] for token in json.loads(text)["added_tokens"]]
    model(max([size, *added]) + 1).save_pretrained(folder)
    templates = json.loads((CHAT / "templates.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": templates[template]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**SPECIAL, **kind}))


def sequential(kind: type) -> Any:
    """Returns a class of TRL's trainers without shuffling; ``noted`` has each loss with all its
    digits.
    """

    class Sequential(kind):  # type: ignore[misc]  # only the environment with TRL knows the class
        """The trainer in the order of the data."""

        def __init__(self, **named: Any) -> None:
            self.noted: list[float] = []
            super().__init__(**named)

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            self.noted.append(float(loss))
            return loss

    return Sequential


def settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of all trainings: fp32 on CPUs."""
    return {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "warmup_steps": WARMUP,
        "weight_decay": DECAY,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def losses(folder: Path, kind: str, *, packing: bool) -> list[float]:
    """Returns the losses that TRL's trainer computes, in fp32 on CPUs, in the order of the data."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        max_length=LENGTH,
        packing=packing,
        assistant_only_loss=kind == "messages",
        per_device_train_batch_size=BATCH,
        **settings(folder),
    )
    trainer = sequential(SFTTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(records(kind)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    losses: list[float] = trainer.noted
    return losses


def main(out: Path) -> None:
    """Writes the losses of all settings."""
    import trl

    made: dict[str, list[float]] = {}
    for template in TEMPLATES:
        for kind in ("messages", "completion"):
            for packing in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    save(Path(folder), template)
                    name = f"{template}/{kind}/{'best-fit' if packing else 'none'}"
                    made[name] = losses(Path(folder), kind, packing=packing)
                    print(name, made[name][0], made[name][-1], flush=True)
    content = {"trl": trl.__version__, "losses": made}
    (out / "losses.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
