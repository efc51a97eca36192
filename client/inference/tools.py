"""``penstock generate`` and ``penstock eval`` use a saved state of a run, or a Hugging Face folder.

This module finds and verifies the saved state. Tool processes in :mod:`penstock.models.inference`
import torch, and answer in lines of JSON: ``note``, ``text`` or ``result``.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client.export import verified_state
from penstock.daemons.node.preparing.hub import DATA, WHOLE, HubFiles, local_folder
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError, PenstockError
from penstock.host.files import parse_json
from penstock.host.limits.scratch import scratch_folder

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """A model: the directory of a run with the saved state of ``step``, or a folder without one.

    ``config`` is a configuration for a folder.
    """

    directory: Path
    state: Path | None = None
    step: int | None = None
    config: Path | None = None

    @property
    def words(self) -> list[str]:
        """The options for a tool."""
        words = [] if self.state is None else ["--state", str(self.state)]
        return words + ([] if self.config is None else ["--config", str(self.config)])

    @property
    def log(self) -> Path | None:
        """The folder for the log of a failure; None for a folder that is no run."""
        return None if self.state is None else self.directory / "logs"


def choose(directory: Path, step: int | None, say: Say, config: Path | None = None) -> ChosenModel:
    """Returns the model in a run directory, a Hugging Face folder, or of the Hub. ``say`` receives
    messages about a fetch.

    Raises:
        ConfigError: it is neither, or an option does not go with it, or no state is saved.
        StateError: the saved state is damaged.
    """
    directory = local_folder("MODEL", directory, WHOLE, say)
    if (directory / "run.json").exists():
        if config is not None:
            raise ConfigError(
                f"--config {config}: {directory} is a run, which has its own configuration; leave"
                " out --config"
            )
        state = verified_state(directory, step)
        return ChosenModel(directory=directory, state=state.path, step=state.version)
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"{directory}: is no run directory (it has no run.json) and no Hugging Face folder (it"
            " has no config.json)"
        )
    if step is not None:
        raise ConfigError(f"--step {step}: {directory} is a Hugging Face folder; leave out --step")
    return ChosenModel(directory=directory, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for text: a ``prompt`` or a file of ``messages``, and the way to choose tokens."""

    prompt: str | None = None
    messages: Path | None = None
    max_new: int
    temperature: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Refuses values that give no text.

        Raises:
            ConfigError: names the option.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ConfigError("penstock generate: give --prompt or --messages, and not both")
        if self.messages is not None and not self.messages.is_file():
            raise ConfigError(f"--messages {self.messages}: no such file")
        if self.max_new < 1:
            raise ConfigError(f"--max-new {self.max_new}: must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature {self.temperature}: must be 0 (the likeliest token) or more"
            )

    @property
    def words(self) -> list[str]:
        """The options for the tool."""
        given = (
            f"--prompt={self.prompt}" if self.messages is None else f"--messages={self.messages}"
        )
        numbers = (self.max_new, self.temperature, self.seed)
        names = ("--max-new", "--temperature", "--seed")
        return [given, *(f"{n}={value}" for n, value in zip(names, numbers, strict=True))]


def generate(
    directory: Path, step: int | None, request: GenerationRequest, say: Say, write: Say
) -> dict[str, Any]:
    """Returns {prompt_tokens, ids, text, step}. ``write`` receives pieces of text as they are
    generated, and ``say`` messages about the progress.

    Raises:
        ConfigError: an option, the model or the prompt cannot be used.
        StateError: the saved state is damaged.
    """
    request.check()
    chosen = choose(directory, step, say)
    result = _answer("generate", chosen, request.words, say, write)
    return {**result, "step": chosen.step}


def evaluate(
    directory: Path, step: int | None, data: str, config: Path | None, say: Say
) -> dict[str, Any]:
    """Returns {loss, perplexity, token_accuracy, counted_tokens, rows, step} of a model on the file
    ``data``. ``say`` receives messages about the progress.

    Raises:
        ConfigError: an option, the model or the data cannot be used.
        StateError: the saved state is damaged.
    """
    fetched = HubFiles(progress=say).local("--data", data, DATA)
    data = data if fetched is None else str(fetched.path)
    if not (Path(data).exists() or glob.has_magic(data) or data.startswith("@")):
        raise ConfigError(f"--data {data}: no such file or folder")
    if config is not None and not config.is_file():
        raise ConfigError(f"--config {config}: no such file")
    chosen = choose(directory, step, say, config)
    result = _answer("evaluate", chosen, [f"--data={data}"], say, lambda piece: None)
    return {**result, "step": chosen.step}


def _answer(
    tool: str, chosen: ChosenModel, words: Sequence[str], say: Say, write: Say
) -> dict[str, Any]:
    """Returns the result of a tool of :mod:`penstock.models.inference`."""
    results: list[dict[str, Any]] = []

    def take(line: str) -> None:
        try:
            fields = parse_json(line)
            name, value = next(iter(fields.items()))
        except (ValueError, AttributeError, StopIteration):
            say(line)  # a library's own message
            return
        if name == "result":
            results.append(value)
        else:
            (write if name == "text" else say)(str(value))

    with _scratch() as scratch:
        run_tool(
            f"penstock.models.inference.{tool}",
            str(chosen.directory),
            str(scratch),
            *chosen.words,
            *words,
            log=None if chosen.log is None else chosen.log / f"{tool}.txt",
            progress=take,
        )
    if not results:
        raise PenstockError(f"penstock.models.inference.{tool}: ended without a result")
    return results[0]


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yields an empty folder that is removed at the end, after the tool's death, too."""
    with scratch_folder("tool") as folder:
        yield folder


def to_text(result: dict[str, Any]) -> str:
    """Returns the result of an evaluation as lines of name and value."""
    shown = {name: value for name, value in result.items() if value is not None}
    width = max(map(len, shown))
    counts = _counts(result)
    lines = []
    for name, value in shown.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        lines.append(f"{name:<{width}}  {text}{counts.get(name, '')}")
    return "\n".join(lines)


def _counts(result: dict[str, Any]) -> dict[str, str]:
    """Returns the counts to write behind the means of an evaluation."""
    counted, accuracy = result.get("counted_tokens"), result.get("token_accuracy")
    if counted is None:
        return {}
    counts = {"loss": f" (mean over {counted:,} tokens)"}
    if accuracy is not None:
        counts["token_accuracy"] = f" ({round(accuracy * counted):,} of {counted:,} tokens)"
    return counts


def to_json(result: dict[str, Any]) -> str:
    """Returns a result as JSON."""
    return json.dumps(result, indent=1, ensure_ascii=False)
