"""The Python interface: functions that do what the commands of their names do.

:func:`train` trains, :func:`load_run` reads a run, and :func:`export`, :func:`generate`,
:func:`evaluate` and :func:`estimate` use a run or a model folder. None of them imports torch here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

from penstock.client import export as exports
from penstock.client.convert.aliases import TRAINERS
from penstock.client.inference import tools
from penstock.client.planning.described import Description
from penstock.client.planning.estimate import Estimate
from penstock.client.planning.estimate import estimate as make_estimate
from penstock.client.planning.options import machine_options
from penstock.client.states import mend_base
from penstock.client.train import TrainResult, run_training
from penstock.client.views.display import Display, Plain, Silent
from penstock.client.views.programs import Bar, OnStep, check_function
from penstock.client.views.run_view import Metrics, StateFolder, all_metrics, saved_states
from penstock.client.views.summary import Summary
from penstock.config.schema import Config, load_config, parse_config
from penstock.config.words import apply_overrides
from penstock.host.errors import ConfigError
from penstock.host.files import write_atomically
from penstock.host.limits.scratch import scratch_folder
from penstock.protocol.run.rundir import RunDirectory, run_of

__all__ = [
    "Estimate",
    "Evaluation",
    "Exported",
    "Generation",
    "Run",
    "TrainResult",
    "estimate",
    "evaluate",
    "export",
    "generate",
    "load_run",
    "train",
]

PathText = str | PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of an export. ``path``: their folder. ``step``: the saved step. ``num_bytes``: the
    bytes of all files. ``notes``: sentences about the files.
    """

    path: Path
    step: int
    num_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generated text. ``ids``: its tokens. ``prompt_tokens``: the number of tokens of the prompt.
    ``step``: the saved step, None for a model folder.
    """

    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Means over ``counted_tokens`` tokens in ``rows`` rows. ``loss`` is in nats a token.

    ``loss`` and ``perplexity`` are None where they are not finite. ``token_accuracy`` is a share.
    ``step``: the saved step, None for a model folder.
    """

    loss: float | None
    perplexity: float | None
    token_accuracy: float
    counted_tokens: int
    rows: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory. Each property reads the files of now, also while the run trains."""

    path: Path

    @property
    def config(self) -> Config:
        """The full configuration, as ``resolved.yaml`` has it."""
        return RunDirectory(self.path).config

    @property
    def metrics(self) -> tuple[Metrics, ...]:
        """All lines of ``metrics.jsonl``, oldest first."""
        return all_metrics(self.path)

    @property
    def summary(self) -> Summary:
        """Losses, evaluations and speed of all starts."""
        return Summary.of(self.metrics, 0)

    @property
    def states(self) -> tuple[StateFolder, ...]:
        """The saved states, oldest first."""
        return tuple(saved_states(self.path))


def train(
    config: Mapping[str, Any] | str | PathLike[str] | Config,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    run_dir: str | PathLike[str] | None = None,
    display: Display | str | None = None,
    on_step: OnStep | None = None,
) -> TrainResult:
    """Trains to the end, and returns the result.

    ``config`` is a mapping like the YAML file, the path of a file, or a :class:`Config`.
    ``overrides`` are texts ``section.key=value``, or a mapping of such keys or of sections.
    ``run_dir`` takes precedence over ``run.dir``. ``display`` is "plain" for lines, "bar" for a
    progress bar, None for nothing, or a :class:`Display`. ``on_step`` gets the line of
    metrics.jsonl of each step, soon after its commit, while training continues. If ``on_step``
    returns True, the run saves and stops (``exit_code`` 5).

    In the main thread, Ctrl-C and SIGTERM stop the run cleanly (``exit_code`` 130), as does
    ``penstock stop`` (5). SIGHUP, SIGUSR1 and SIGUSR2 do so, too, unless the program handles or
    ignores them. The same call resumes a stopped run.

    Raises:
        PenstockError: nothing was started: bad configuration or argument, too little memory, or the
            run is in use.
        Exception: the exception of ``on_step``, after the run has saved and stopped.
    """
    texts = _override_texts(overrides)
    resolved = _resolved(config, texts)
    if on_step is not None:
        check_function(on_step)
    continued = run_of(_path("config", config)) if isinstance(config, str | PathLike) else None
    if continued is None or any(text.startswith("run.dir=") for text in texts):
        continued = resolved.run_dir
    directory = continued if run_dir is None else _path("run_dir", run_dir)
    mend_base(directory, lambda line: sys.stderr.write(f"{line}\n"))
    return run_training(resolved, directory, _display_of(display), on_step=on_step)


def load_run(run_dir: PathText) -> Run:
    """Returns the run in a directory.

    Raises:
        ConfigError: the directory has no run.
    """
    path = _path("run_dir", run_dir)
    if not (path / "run.json").exists():
        raise ConfigError(f"run_dir = {str(path)!r}: is no run directory (it has no run.json)")
    return Run(path=path)


def export(
    run: Run | PathText,
    output: PathText,
    *,
    step: int | None = None,
    form: str = exports.HF,
    dtype: str | None = None,
    names: str = exports.TRANSFORMERS,
    whole: bool = False,
    verify: bool = False,
) -> Exported:
    """Writes a saved state into ``output``, a new or empty folder, as ``penstock export`` does.

    ``step``: None for the newest. ``form``: "hf", "peft", "dcp" or "universal". ``dtype``: "fp32",
    "bf16" or "fp16"; None for that of the command. ``names``: "transformers", or "torchtitan" for
    "dcp". ``whole`` adds untrained parts of a multimodal model. ``verify`` reads the files back.

    Raises:
        ConfigError: an argument is impossible, no such step is saved, or ``output`` has files.
        StateError: the saved state is damaged, or a verified tensor differs.
    """
    options = exports.ExportOptions(form=form, dtype=dtype, names=names, whole=whole, verify=verify)
    folder = _path("output", output)
    report = exports.export(_place("run", run), folder, step, options)
    return Exported(
        path=folder, step=report["step"], num_bytes=report["bytes"], notes=tuple(report["notes"])
    )


def generate(
    model: Run | PathText,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    max_new: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    step: int | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Generates up to ``max_new`` tokens with a saved state of a run, or with a model folder.

    ``prompt`` is a text to continue, or messages such as ``{"role": "user", "content": "Hi"}``,
    which the chat template renders. ``temperature`` 0 takes the likeliest tokens; others are drawn
    by ``seed``. ``on_text`` gets each piece of text as soon as it is made.

    Raises:
        ConfigError: an argument, the model or the prompt cannot be used.
        StateError: the saved state is damaged.
    """
    place, write = _place("model", model), on_text or _drop
    with scratch_folder("messages") as folder:
        file = None
        if not isinstance(prompt, str):
            file = folder / "messages.json"
            write_atomically(file, json.dumps(_as_dicts(list(prompt)), ensure_ascii=False))
        request = tools.GenerationRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            messages=file,
            max_new=max_new,
            temperature=temperature,
            seed=seed,
        )
        result = tools.generate(place, step, request, _drop, write)
    return Generation(
        text=result["text"],
        ids=tuple(result["ids"]),
        prompt_tokens=result["prompt_tokens"],
        step=result["step"],
    )


def evaluate(
    model: Run | PathText,
    data: PathText,
    *,
    config: PathText | None = None,
    step: int | None = None,
) -> Evaluation:
    """Computes the loss of a saved state of a run, or of a model folder, on a file of data.

    ``data``: a file, a folder or a glob, as ``data.path`` takes it. ``config``: a configuration
    that says how data are read, for a model folder. ``step``: None for the newest saved step.

    Raises:
        ConfigError: an argument, the model or the data cannot be used.
        StateError: the saved state is damaged.
    """
    settings = None if config is None else _path("config", config)
    file = str(_path("data", data))
    return Evaluation(**tools.evaluate(_place("model", model), step, file, settings, _drop))


def estimate(
    model: PathText,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    workers: int = 1,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    gpu: str | None = None,
    host_memory: str | None = None,
    shm: str | None = None,
) -> Estimate:
    """Returns memory (bytes), disk (bytes) and the time of a step (seconds) of a model's training,
    as ``penstock estimate`` does.

    ``model``: a folder with ``config.json``, which needs no weights, or a name of the catalogue.
    ``overrides``: keys as for :func:`train`. ``sequence_length`` is in tokens, ``global_batch`` in
    rows. ``gpu`` (a name of the catalogue), ``host_memory`` and ``shm`` (sizes such as ``"128G"``)
    describe a machine; without them it is this one. ``run.fits`` of the result says whether the
    machine has the memory, ``to_text()`` is the table, and ``to_dict()`` has the figures.

    Raises:
        ConfigError: the model or an argument is impossible.
    """
    described = Description(
        model=str(_path("model", model)),
        machine=machine_options(gpu, None, host_memory, shm),
        workers=workers,
        sequence_length=sequence_length,
        global_batch=global_batch,
        settings=_override_texts(overrides),
    )
    return make_estimate(described)


def _place(name: str, value: object) -> Path:
    """Returns the folder of a run, or of a path."""
    return value.path if isinstance(value, Run) else _path(name, value)


def _drop(text: str) -> None:
    """Drops a message about progress."""


def _resolved(config: object, overrides: tuple[str, ...]) -> Config:
    if isinstance(config, str | PathLike):
        return load_config(_path("config", config), overrides, translation=TRAINERS)
    if isinstance(config, Config):
        config = config.model_dump(mode="json", exclude_unset=True)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config = {config!r}: expected the path of a YAML file, a mapping of sections (run,"
            " model, data, …), or a Config"
        )
    return parse_config(apply_overrides(_as_dicts(config), overrides), translation=TRAINERS)


def _as_dicts(value: Any) -> Any:
    """Returns a value with all mappings as dictionaries, as YAML files have them."""
    if isinstance(value, list):
        return [_as_dicts(each) for each in value]
    return {k: _as_dicts(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _override_texts(overrides: object) -> tuple[str, ...]:
    if isinstance(overrides, Mapping):
        return tuple(_texts_of(overrides, ""))
    if not isinstance(overrides, Sequence) or isinstance(overrides, str | bytes):
        raise ConfigError(
            f"overrides = {overrides!r}: expected a mapping such as {{'train.steps': 50}}, or a"
            " list of texts such as 'train.steps=50'"
        )
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                f"overrides: {override!r} is no str; expected a text such as 'train.steps=50'"
            )
    return tuple(overrides)


def _texts_of(overrides: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """Yields the values of a mapping as ``section.key=value``. A section, or the value of a key,
    may be a mapping.
    """
    for key, value in overrides.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(
                f"overrides: key {key!r} is no str; expected a text such as 'train.steps'"
            )
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not prefix and "." not in key:
            yield from _texts_of(value, f"{name}.")
        else:
            text = json.dumps(_as_dicts(value), default=str, ensure_ascii=False)
            yield f"{name}={text}"


def _path(name: str, value: object) -> Path:
    """Returns the path; refuses an empty text and bytes."""
    if isinstance(value, str | PathLike):
        path = value if isinstance(value, str) else value.__fspath__()
        if isinstance(path, str) and path:
            return Path(path)
    raise ConfigError(f"{name} = {value!r}: expected a path as str or pathlib.Path")


def _display_of(display: object) -> Display:
    if display is None:
        return Silent()
    if display == "plain":
        return Plain(sys.stdout)
    if display == "bar":
        return Bar(sys.stderr)
    missing = [
        name for name in ("say", "show", "close") if not callable(getattr(display, name, None))
    ]
    if isinstance(display, str) or missing:
        lacks = (
            "" if isinstance(display, str) else " has no " + ", ".join(f"{m}()" for m in missing)
        )
        raise ConfigError(
            f"display = {display!r}:{lacks or ' is unknown'}; expected 'plain', 'bar', None, or a"
            " Display (penstock.client.views.display)"
        )
    return cast(Display, display)
