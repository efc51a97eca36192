"""Generation by transformers from a run's saved state or a Hugging Face folder.

``python -m penstock.models.inference.generate PLACE SCRATCH`` answers in lines of JSON
(:mod:`penstock.models.inference.lines`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from penstock.host.errors import ConfigError, reason
from penstock.host.files import parse_json
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.masks import prompt_of
from penstock.models.data.chat.requests import ChatRequest, Format, RecordForm
from penstock.models.data.rows.samples import Way
from penstock.models.data.tokenizer import open_tokenizer
from penstock.models.inference.lines import write_line
from penstock.models.inference.loading import (
    ModelPlace,
    add_place,
    load_model,
    load_tokenizer,
    positions_of,
)
from penstock.protocol.run.process import tool_main


class LineStreamer(TextStreamer):
    """A streamer that writes each finished piece of text as a line for the parent process."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes a piece of text."""
        if text:
            write_line("text", text)


def generate(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the number of the prompt's tokens, and ids and text behind the prompt.

    Raises:
        ConfigError: the model, the prompt or an option cannot be used.
        StateError: the saved state is damaged.
    """
    place = ModelPlace.of(options)
    conversation = None if options.messages is None else _conversation(options.messages)
    model = load_model(place, options.scratch)
    tokenizer = load_tokenizer(place, options.scratch)
    if conversation is None:
        ids = tokenizer(options.prompt)["input_ids"]
    else:
        ids = _prompt_ids(place, conversation, model)
    _check_length(ids, options.max_new, model)
    torch.manual_seed(options.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature}
    prompt = torch.tensor([ids], device=model.device)
    made = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.max_new,
        streamer=LineStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    new = made[0, len(ids) :].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    return {"prompt_tokens": len(ids), "ids": new, "text": text}


def _conversation(path: Path) -> ChatRequest:
    """Returns the conversation in a JSON file: a list of messages, or a record that has one.

    Raises:
        ConfigError: the file cannot be read, or holds no conversation.
    """
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--messages {path}: cannot read it as JSON: {reason(error)}; give a list such as"
            ' [{"role": "user", "content": "…"}]'
        ) from error
    fields = value if isinstance(value, Mapping) else {"messages": value}
    request = request_of(str(path), fields, RecordForm(format=Format.CHAT))
    assert isinstance(request, ChatRequest)
    return request


def _prompt_ids(place: ModelPlace, conversation: ChatRequest, model: Any) -> list[int]:
    """Returns the ids of a conversation up to the header of the assistant's next turn.

    Raises:
        ConfigError: there is no chat template, or the template refuses the conversation.
    """
    tokenizer = open_tokenizer(place.config)
    if tokenizer is None:
        raise ConfigError(
            f"{place.folder}: was trained on token numbers (data.tokens), so no tokenizer renders"
            " messages; give --prompt"
        )
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    way = Way.of(place.config.data, tokenizer.chat_parts(), vocab_size)
    passage = prompt_of(conversation, way.encoder, way.template, way.choices)
    return way.encoder.encode([passage])[0].ids


def _check_length(ids: Sequence[int], max_new: int, model: Any) -> None:
    """Refuses a prompt without tokens, or with more tokens than the model has positions.

    Raises:
        ConfigError: names the numbers.
    """
    positions = positions_of(model)
    if not ids:
        raise ConfigError("the prompt has no tokens; give a longer text")
    if positions is None or len(ids) + max_new <= positions:
        return
    if len(ids) >= positions:
        raise ConfigError(
            f"the prompt has {len(ids):,} tokens, and the model has {positions:,} positions; give a"
            " shorter prompt"
        )
    raise ConfigError(
        f"--max-new {max_new}: the prompt has {len(ids):,} tokens, and the model has"
        f" {positions:,} positions; give at most {positions - len(ids)}, or a shorter prompt"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the generation; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.inference.generate", description=__doc__)
    add_place(parser)
    parser.add_argument("--prompt", help="text")
    parser.add_argument("--messages", type=Path, help="JSON file with a conversation")
    parser.add_argument("--max-new", type=int, required=True, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn tokens")
    options = parser.parse_args(arguments)
    return tool_main(
        lambda: write_line("result", generate(options)), options.place, options.parent_pid
    )


if __name__ == "__main__":
    sys.exit(main())
