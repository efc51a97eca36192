"""Small model folders as the Hub has them: weights, tokenizer, chat template, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

TEXT = "Pumps push water up the hill; a penstock brings it down to the wheel.\n" * 8
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}"
    + START
    + "{{ m['role'] }}\n{{ m['content'] }}"
    + STOP
    + "{% endfor %}"
)
NUM_TOKENS = 302
"""Of :func:`trained_tokenizer`: 300 learned ones, and two that were added afterwards."""


def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer whose last two tokens were added, as chat models add theirs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - 2,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(STOP, special=True)])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """With chat template and special tokens."""
    PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer(),
        eos_token=END,
        pad_token=STOP,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def save_model(folder: Path, model_type: str, *, seed: int = 0, **fields: Any) -> Any:
    """A folder with a random model of that type and the tokenizer; returns the model."""
    disable_progress_bar()  # the first one starts a thread for the rest of the process
    save_tokenizer(folder)
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    hf_config = AutoConfig.for_model(model_type, **{"vocab_size": 320, **special, **fields})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, eos_token_id=0)
    model.save_pretrained(folder)
    return model


def start_from_folder(config: Path) -> Path:
    """Let a run start from a random model that transformers has drawn and saved, in place of the
    ``model.hf`` of its configuration, over bytes; returns the configuration.
    """
    disable_progress_bar()
    fields = yaml.safe_load(config.read_text())
    hf = dict(fields["model"].pop("hf"))
    masked = fields["data"].get("objective") == "masked"
    special = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    sizes = {"vocab_size": 258 if masked else 257, **special, **hf}
    folder = config.with_name(f"{config.stem}-model")
    torch.manual_seed(fields["run"]["seed"])
    kind.from_config(AutoConfig.for_model(**sizes), dtype=torch.float32).save_pretrained(folder)
    fields["model"]["path"] = str(folder)
    config.write_text(yaml.safe_dump(fields))
    return config
