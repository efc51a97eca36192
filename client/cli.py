"""Functions that all commands share: options, error messages, versions, examples.

Also recognizes words such as ``train.steps=5``, for which the user forgot ``--set``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import penstock
from penstock.host.errors import ConfigError, ExitCode, PenstockError, reason
from penstock.host.trust import printable

if TYPE_CHECKING:
    from penstock.config.schema import Config
    from penstock.daemons.preload.starting import Preloading

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG.yaml", help="Configuration file; penstock config explains its keys."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Value of a configuration key, instead of the file's: --set train.steps=100. Repeat"
        " the option for several keys.",
    ),
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Same as RUN.")]
OptionalRunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Directory of the run, such as runs/tiny.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Prints the result as JSON.")]


def command_group(name: str, explanation: str) -> typer.Typer:
    """Returns a group of commands below ``penstock`` with the help text ``explanation``."""
    return typer.Typer(
        name=name,
        help=explanation,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def one_run(run: Path | None, run_dir: Path | None) -> Path | None:
    """Returns the directory of the run that the user named by RUN or by ``--run-dir``; None without
    one.

    Raises:
        ConfigError: both are given, and differ.
    """
    if run is not None and run_dir is not None and run != run_dir:
        raise ConfigError(f"{run} and --run-dir {run_dir}: two runs; give one of them")
    return run_dir if run is None else run


@contextmanager
def errors_explained(
    log_dir: Path | None = None, interrupted: ExitCode = ExitCode.INTERRUPTED
) -> Iterator[None]:
    """Turns errors into one line on stderr and an exit code. Unexpected errors also go to a file
    with their traceback. ``interrupted`` is the exit code after a stop signal.
    """
    try:
        yield
    except PenstockError as error:
        sys.stderr.write(f"penstock: {explained(error)}\n")
        raise typer.Exit(int(error.exit_code)) from error
    except KeyboardInterrupt as error:
        sys.stderr.write("penstock: interrupted\n")
        raise typer.Exit(int(interrupted)) from error
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        path = _write_trace(log_dir)
        sys.stderr.write(f"penstock: internal error: {error!r}; details are in {path}\n")
        raise typer.Exit(int(ExitCode.LOST_MEMBERS)) from error


@contextmanager
def exchange_errors_explained(as_json: bool) -> Iterator[None]:
    """Explains errors of ``import``, ``export`` and ``inspect``. Their exit code is 2, also on a
    full disk. ``as_json`` prints each as JSON on stdout, too: ``error``, and the report so far.
    """
    with errors_explained():
        try:
            yield
        except PenstockError as error:
            if as_json:
                typer.echo(json.dumps({**error.report, "error": str(error)}, indent=1))
            raise ConfigError(str(error)) from error


def explained(error: PenstockError) -> str:
    """Returns the message of an error. One about bad input is a line, as it has names of strangers;
    others may have a table.
    """
    is_input = error.exit_code is ExitCode.BAD_CONFIG
    return printable(str(error)) if is_input else str(error)


def _write_trace(log_dir: Path | None) -> Path:
    directory = log_dir if log_dir is not None and log_dir.is_dir() else None
    with tempfile.NamedTemporaryFile(
        "w", prefix="penstock-error-", suffix=".txt", dir=directory, delete=False
    ) as file:
        traceback.print_exc(file=file)
    return Path(file.name)


def load(config: Path, settings: list[str] | None) -> Config:
    """Reads a configuration with its overrides.

    Raises:
        ConfigError: the file is missing or bad. For a missing example, the message names the
            command that writes the example.
    """
    from penstock.client.convert.aliases import TRAINERS
    from penstock.config.schema import load_config

    if not config.exists() and config.suffix in (".yaml", "") and config.stem in example_names():
        raise ConfigError(
            f"configuration {config}: does not exist; penstock init --example {config.stem} writes"
            " this example into the current folder"
        )
    return load_config(
        config,
        tuple(settings or ()),
        hint=lambda text: typer.echo(f"hint: {text}", err=True),
        translation=TRAINERS,
    )


def begin_to_import() -> Preloading:
    """Returns a process that starts at once to import torch, for all processes that need it."""
    from penstock.daemons.preload.preloaders import TORCH
    from penstock.daemons.preload.starting import Preloading

    return Preloading(TORCH, os.environ)


def say_preparation(message: str) -> None:
    """Reports a message on stderr, and to a service manager that waits for this node."""
    from penstock.daemons.node.service_manager import ServiceManager

    typer.echo(message, err=True)
    ServiceManager.of(os.environ, os.getpid()).prepares(message)


def terminal_width() -> int:
    """Returns how many columns of the terminal to fill with text."""
    import shutil

    return min(160, shutil.get_terminal_size((100, 24)).columns)


_REPORTED = ("torch", "transformers")
"""Packages with kernels and models: their versions decide the bits of results."""


def versions() -> str:
    """Returns the version of Penstock, and on a second line versions for a bug report. Imports no
    package.
    """
    others = [f"Python {platform.python_version()}", *map(_version_of, _REPORTED)]
    return f"penstock {penstock.__version__}\n{', '.join(others)}, {platform.machine()}"


def _version_of(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} is missing"


_SETTING = re.compile(r"(?:--)?([a-z_]+(?:\.\w+)*)(=.*)?", re.DOTALL)


class Command(TyperCommand):
    """A command with ``--set`` that explains words such as ``train.steps=5``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words after the command.

        Raises:
            BadParameter: a key of the configuration stands without ``--set``.
        """
        options = {name for option in self.params for name in option.opts}
        if "--set" in options:
            settings = bare_settings(args, options)
            if settings:
                raise typer.BadParameter(
                    f"configuration keys need --set; write {' '.join(settings)}",
                    ctx=ctx,
                )
            if (answer := foreign_setting(args, options)) is not None:
                raise typer.BadParameter(answer, ctx=ctx)
        return super().parse_args(ctx, args)


SECTIONS: Mapping[str, Sequence[str]] = {
    "Train": ("init", "convert", "config", "docs", "data", "train", "doctor"),
    "Observe runs": ("list", "status", "watch", "trace", "report"),
    "Control a run": ("pause", "resume", "snapshot", "stop"),
    "Saved steps": (
        "snapshots",
        "rollback",
        "export",
        "weights",
        "import",
        "inspect",
        "generate",
        "eval",
    ),
    "Plan": ("estimate", "plan", "simulate", "tune", "profile"),
    "Several machines": ("node", "keys", "deploy"),
    "Test": ("chaos",),
}
"""Commands of ``penstock --help`` by section, without the processes that a node starts."""


class SectionedHelp(TyperGroup):
    """Lists the commands of ``penstock --help`` by section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each entry of :data:`SECTIONS`, with one line a command."""
        longest = max(map(len, chain.from_iterable(SECTIONS.values())))
        limit = formatter.width - 6 - longest
        for section, names in SECTIONS.items():
            helps = [self.commands[name].get_short_help_str(limit) for name in names]
            with formatter.section(section):
                formatter.write_dl([*zip([n.ljust(longest) for n in names], helps, strict=True)])


def bare_settings(words: list[str], options: Collection[str] = ()) -> list[str]:
    """Returns the ``--set`` options for words such as ``train.steps=5``, ``--train.steps=5``,
    ``--train.steps 5`` or ``steps=5``. Skips other words and the ``options`` of the command:
    ``penstock chaos`` has an option ``--seed``.
    """
    settings = []
    for before, word, after in zip(["", *words], words, [*words[1:], "VALUE"], strict=False):
        match = _SETTING.fullmatch(word)
        if match is None or before == "--set" or word.partition("=")[0] in options:
            continue
        key, value = match.groups()
        if value is None and word.startswith("--") and "." in key:
            value = f"={after}"
        if value is not None and (key := _configuration_key(key)):
            settings.append(f"--set {key}{value}")
    return settings


def foreign_setting(words: list[str], options: Collection[str]) -> str | None:
    """Returns the answer to the first word such as ``--learning_rate``, a key of another trainer;
    None without one. Skips the ``options`` of the command.
    """
    from penstock.client.convert.aliases import TRAINERS

    for before, word in pairwise(["", *words]):
        key, assigned, _ = word.partition("=")
        is_word = assigned or key.startswith("--")
        if before == "--set" or key in options or not is_word:
            continue
        name = key.removeprefix("--").replace("-", "_")
        if (answer := TRAINERS.of(name)) is not None:
            return f"{key}: unknown; {answer}, as --set SECTION.KEY=VALUE"
    return None


def _configuration_key(word: str) -> str:
    """Returns ``train.steps`` for ``train.steps`` or ``steps``; empty for a word that is no key."""
    # Imported late: pydantic is slow, and most command lines have no such word.
    from penstock.config.schema import Config
    from penstock.config.words import keys_of

    known = keys_of(Config)
    section = word.partition(".")[0]
    if "." in word:
        return word if section in Config.model_fields else ""
    return next((key for key, last in known.items() if last == word), "")


def first_commands(written: Path) -> str:
    """Returns the commands that train with an example, by machine."""
    config = load(written, None)
    nodes = config.cluster.nodes
    if len(nodes) == 1:
        return f"{written} is written; start with: penstock train {written}"
    places = ", ".join(f"{node.name} on {node.host}" for node in nodes)
    authority = f"~/{config.run.name}-authority"
    lines = [
        f"{written} is written, for nodes {places}: put the names of your machines into"
        " cluster.nodes.",
        "All machines need this folder at the same path: it holds the run and its keys.",
        "",
        f"{nodes[0].host}$ penstock keys make {config.cluster.keys} --config {written}"
        f" --authority {authority}",
        *(f"{node.host}$ penstock node --config {written} --node {node.name}" for node in nodes),
        "",
        f"watch: penstock watch {config.run_dir}",
        f"stop:  penstock stop {config.run_dir}; the same node commands resume",
    ]
    return "\n".join(lines)


_EDITORS = "# yaml-language-server:"
_FOLDER = Path(__file__).parents[1] / "examples"
_DATA_FILE = re.compile(r"examples/([\w-]+\.(?:jsonl|parquet))")
"""Data of an example, which are written next to its configuration."""


def example_names() -> tuple[str, ...]:
    """Returns the names that ``penstock init --example`` accepts."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def _copy_data(source: Path, target: Path) -> None:
    """Writes a data file of an example; the same content may be there already.

    Raises:
        ConfigError: another file has the name.
        OSError: the file cannot be written.
    """
    content = source.read_bytes()
    if os.path.lexists(target):
        if not target.is_file() or target.read_bytes() != content:
            raise ConfigError(f"{target}: exists, with other content; name another folder by --out")
        return
    with target.open("xb") as file:
        file.write(content)


def write_example(name: str, output: Path | None) -> Path:
    """Writes an example to ``output``, and its data next to it. Default: NAME.yaml in the current
    folder.

    Raises:
        ConfigError: the example does not exist, or the file exists or cannot be written.
    """
    if name not in example_names():
        raise ConfigError(f"--example {name}: accepted are {', '.join(example_names())}")
    target = Path(f"{name}.yaml") if output is None else output
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    # Drops the editors' schema line: its path is valid in the source tree only.
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(_EDITORS)]
    files = sorted(set(_DATA_FILE.findall(text)))
    if os.path.lexists(target):
        raise ConfigError(f"{target}: exists; name another file with --out")
    try:
        for file_name in files:
            _copy_data(_FOLDER / file_name, target.with_name(file_name))
        with target.open("x", encoding="utf-8") as file:
            moved = "".join(lines).replace(f"examples/{name}.yaml", str(target))
            file.write(_DATA_FILE.sub(lambda match: str(target.with_name(match[1])), moved))
    except FileExistsError as error:
        raise ConfigError(f"{target}: exists; name another file with --out") from error
    except OSError as error:
        raise ConfigError(f"{target}: cannot write it: {reason(error)}") from error
    return target
