"""``penstock init --model FOLDER --data FILE``: a first configuration for a model and its data.

The first records are prepared in a temporary folder, as ``penstock data`` does, with the values
that are written. So ``penstock data`` and ``penstock train`` accept the file unedited.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from penstock.client.planning.data_rows import RowRange, read_rows
from penstock.client.planning.described import Description, gpu_here
from penstock.client.planning.estimate import Estimate, estimate
from penstock.client.views.progress import Working
from penstock.config.evaluation import EVAL
from penstock.config.hub_names import from_hub, hub_name
from penstock.config.schema import parse_config
from penstock.config.values import DPO, NEXT_TOKEN, PAIR, PAIR_OBJECTIVES, human_bytes
from penstock.daemons.node.preparing.gpus import FoundGpu
from penstock.daemons.node.preparing.hub import DATA, TOKENIZER, HubFiles
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.preload.starting import Starter
from penstock.host.errors import CapacityError, ConfigError, reason
from penstock.host.files import DAMAGED, parse_json, write_new
from penstock.host.limits.scratch import scratch_folder
from penstock.protocol.plan.positions import positions_of

_MOST_LENGTH = 4096
"""Tokens of the longest row that is chosen; a longer row is the user's choice."""

_SHORTEST_ROW, _SHORTEST_LENGTH = 256, 32
"""Tokens of a row that is chosen for short samples, and for too short texts."""

_SAMPLES_A_ROW = 4
"""Samples of medium length that fit into a row: best fit then leaves little padding."""

_BATCH = 16
"""Rows of a step, if a pass has at least four steps of them."""

_SMALL_MODEL = 1_000_000_000
"""Parameters below which a model takes the higher rate."""

_EPOCHS = {"samples": 3, "text": 1, "pairs": 1}
SAMPLE_BYTES = 16 << 20
"""Bytes of records, as JSON lines, that choices are made by."""

OBJECTIVES = (NEXT_TOKEN, *PAIR_OBJECTIVES)
"""Values of ``--objective``."""

_TOO_LONG = "data.sequence_length ="
"""Beginning of an error that shorter rows may mend."""

_MARGIN = 33
"""Columns of keys and values, in front of comments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The model folder, the data and the file to write, as the user named them.

    ``lora``: adapters are trained. ``objective``: one of :data:`OBJECTIVES`, or None to take the
    one that goes with the records. ``held_out``: data to evaluate on.
    """

    model: Path
    data: str
    output: Path | None = None
    lora: bool = False
    objective: str | None = None
    held_out: str | None = None

    def check(self) -> None:
        """Refuses values that are known to be wrong before a file is read.

        Raises:
            ConfigError: names the option.
        """
        if self.objective not in (None, *OBJECTIVES):
            raise ConfigError(f"--objective {self.objective}: accepted are {', '.join(OBJECTIVES)}")
        for option, place in (("--data", self.data), ("--eval", self.held_out)):
            known = place is None or place.startswith("@") or hub_name(place) is not None
            if place is not None and not (known or glob.has_magic(place) or Path(place).exists()):
                raise ConfigError(f"{option} {place}: no such file or folder")
        if os.path.lexists(self.target):
            raise ConfigError(f"{self.target}: exists; name another file with --out")

    @property
    def words(self) -> str:
        """The options of the command, for a comment."""
        words = [f"--model {self.model}", f"--data {self.data}"]
        words += ["--lora"] if self.lora else []
        words += [f"--objective {self.objective}"] if self.objective else []
        words += [f"--eval {self.held_out}"] if self.held_out else []
        return " ".join(words)

    @property
    def target(self) -> Path:
        """The file to write."""
        return Path(f"{self.name}.yaml") if self.output is None else self.output

    @property
    def name(self) -> str:
        """The name of the run."""
        stem = self.model.resolve().name if self.output is None else self.output.stem
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:64].strip("-") or "run"


def write_start(start: Start, progress: Working, starter: Starter | None = None) -> Path:
    """Writes the configuration to a new file, and returns the file. ``starter`` starts the
    processes that need torch.

    Raises:
        ConfigError: the file exists or cannot be written, the folder is no model with weights, or
            the data cannot be read.
    """
    start.check()
    write_new(start.target, _text(start, progress, starter))
    return start.target


@dataclass(slots=True, kw_only=True)
class _Draft:
    """Choices so far. ``comments`` are by ``section.key``."""

    values: dict[str, dict[str, Any]]
    comments: dict[str, str]

    def put(self, key: str, value: Any, comment: str) -> None:
        """Sets or replaces a key such as ``train.epochs``."""
        section, _, name = key.partition(".")
        self.values.setdefault(section, {})[name] = value
        self.comments[key] = comment


def _text(start: Start, progress: Working, starter: Starter | None) -> str:
    hub = HubFiles(progress=progress)
    fetched = hub.local("--model", start.model, TOKENIZER)
    folder = start.model if fetched is None else fetched.path
    settings = _model_settings(folder, weighs=fetched is None)
    records = hub.local("--data", start.data, DATA)
    draft = _Draft(values={"run": {"name": start.name, "dir": f"runs/{start.name}"}}, comments={})
    gpu = gpu_here()
    dtype = "fp32" if gpu is None else "bf16"
    draft.put("model.path", str(start.model), "")
    why = "; on CPUs bf16 is no faster" if gpu is None else ", with fp32 masters in host memory"
    draft.put("model.dtype", dtype, f"type of the weights on the device{why}")
    draft.put("data.path", start.data, "")
    limit = positions_of(settings)
    _put_template(draft, folder)
    if start.lora:
        draft.put("adapter.r", 16, "rank of the adapters, on all linear layers")
        draft.put("adapter.alpha", 32, "their factor is alpha / r")
    # Names of the Hub stay in the file; their files of now are measured.
    draft.values["model"]["path"] = str(folder)
    draft.values["data"]["path"] = start.data if records is None else str(records.path)
    summary = _measured(draft, start, limit, progress, starter)
    if start.held_out is not None:
        _put_evaluation(draft, start.held_out, summary)
    progress.doing("estimating memory")
    costs = _costs(folder, draft)
    draft.values["model"]["path"] = str(start.model)
    draft.values["data"]["path"] = start.data
    _put_rate(draft, costs)
    _put_device(draft, gpu)
    parse_config(draft.values, source=str(start.target))
    return "\n".join([*_head(start, summary, costs), *_lines(draft)]) + "\n"


def _measured(
    draft: _Draft,
    start: Start,
    limit: int | None,
    progress: Working,
    starter: Starter | None,
) -> Mapping[str, Any]:
    """Sets length, passes and batch by the first records; returns their summary. ``whole`` in the
    summary tells whether these are all records.

    Raises:
        PenstockError: the data cannot be read or prepared.
    """
    length = min(limit or _MOST_LENGTH, _MOST_LENGTH)
    draft.put("data.sequence_length", length, "")
    draft.put("train.epochs", 1, "")
    draft.put("train.global_batch", 1, "")
    draft.put("cluster.device", "cpu", "")
    path = str(draft.values["data"]["path"])
    with scratch_folder("init") as folder:
        sample = folder / "sample.jsonl"
        answers: list[str] = []
        words = (path, str(sample), str(SAMPLE_BYTES))
        progress.doing(f"reading the first records of {path}")
        run_tool("penstock.models.data.reading.sample", *words, progress=answers.append)
        answer = json.loads(answers[-1])
        whole = bool(answer["whole"])
        _put_objective(draft, start.objective, pairs=bool(answer["pairs"]))
        place = path if whole else str(sample)
        progress.doing("preparing them as training does")
        source = _Prepared(place=place, progress=progress, starter=starter)
        summary, limit = _first_summary(draft, source, limit)
        length = _length(draft)
        _put_length(draft, {**summary, "whole": whole}, limit)
        if _length(draft) != length:
            progress.doing(f"preparing them again, in rows of {_length(draft)} tokens")
            summary = _summary(draft, source)
    _put_steps(draft, {**summary, "whole": whole})
    return {**summary, "whole": whole}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Data that are prepared for their summary. ``place``: their file, or that of their first
    records.
    """

    place: str
    progress: Callable[[str], None]
    starter: Starter | None


def _length(draft: _Draft) -> int:
    return int(draft.values["data"]["sequence_length"])


def _put_objective(draft: _Draft, objective: str | None, *, pairs: bool) -> None:
    """Sets the objective of pairs of answers, if the records are pairs or the user asks for it."""
    if objective == NEXT_TOKEN or not (pairs or objective):
        return
    why = "records have chosen and rejected" if pairs else "by --objective"
    comment = f"{why}: learns to prefer one answer to the other"
    draft.put("data.objective", objective or DPO, comment)
    draft.put("train.global_batch", PAIR, "")


def _trains_on_pairs(draft: _Draft) -> bool:
    return draft.values["data"].get("objective") in PAIR_OBJECTIVES


def _put_evaluation(draft: _Draft, path: str, summary: Mapping[str, Any]) -> None:
    """Sets an evaluation on held-out data, twice in a pass."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).name.partition(".")[0])[:40].strip("-")
    steps = -(-summary["rows_per_epoch"] // int(draft.values["train"]["global_batch"]))
    name = name if name and name != EVAL else "held-out"
    sets = [{"name": name, "path": path, "every": max(1, steps // 2)}]
    draft.put("eval.sets", sets, "twice in a pass")


def _first_summary(
    draft: _Draft, source: _Prepared, limit: int | None
) -> tuple[Mapping[str, Any], int | None]:
    """Returns the summary with the longest rows that the model's type takes, and the limit of their
    length. Some types train on samples in shorter rows alone.

    Raises:
        PenstockError: the data cannot be prepared.
    """
    while True:
        length = _length(draft)
        try:
            return _summary(draft, source), limit
        except ConfigError as error:
            if not str(error).startswith(_TOO_LONG) or length <= _SHORTEST_ROW:
                raise
        limit = length // 2
        draft.put("data.sequence_length", limit, "")


def _model_settings(folder: Path, *, weighs: bool) -> Mapping[str, Any]:
    """Returns ``config.json`` of a model folder; ``weighs``: one that must have weights.

    Raises:
        ConfigError: the path is no model folder, or has no weights.
    """
    place = f"--model {str(folder)!r}"
    if not folder.is_dir():
        seen = "is a file" if folder.is_file() else "no such folder"
        raise ConfigError(f"{place}: {seen}; give a model folder ({from_hub(folder)})")
    try:
        settings = parse_json((folder / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{place}: has no config.json ({reason(error)}); give a folder in the Hugging Face"
            f" layout ({from_hub(folder)})"
        ) from error
    except DAMAGED as error:
        raise ConfigError(f"{place}: config.json is damaged: {error}; fetch it again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{place}: config.json is no object; fetch it again")
    if weighs and not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise ConfigError(
            f"{place}: has no weights (*.safetensors); fetch the whole folder ({from_hub(folder)})"
        )
    return settings


def _put_template(draft: _Draft, folder: Path) -> None:
    """Sets the template of a tokenizer without one, and the date of one that writes the date."""
    template = ""
    with suppress(OSError, UnicodeDecodeError):
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not template:
        with suppress(OSError, *DAMAGED, AttributeError):
            settings = parse_json((folder / "tokenizer_config.json").read_bytes())
            template = json.dumps(settings.get("chat_template") or "")[1:-1]
    if not template:
        draft.put(
            "data.chat_template", "chatml", "the tokenizer has none; conversations need a template"
        )
    elif "strftime_now" in template and "date_string" in template:
        today = date.today().strftime("%d %b %Y")
        draft.put(
            "data.chat_template_kwargs",
            {"date_string": today},
            "the template writes the date of the day; this fixes it",
        )


def _summary(draft: _Draft, source: _Prepared) -> Mapping[str, Any]:
    """Returns the summary of ``penstock data`` of the draft's data, or of their first records.

    Raises:
        PenstockError: the data cannot be prepared.
    """
    lines: list[str] = []
    path, place = str(draft.values["data"]["path"]), source.place
    values = {**draft.values, "data": {**draft.values["data"], "path": place}}
    config = parse_config(values, source="penstock init")

    def named(text: str) -> str:
        return text if place == path else text.replace(place, f"the first records of {path}")

    try:
        read_rows(
            config,
            RowRange(end=1),
            lines.append,
            progress=lambda text: source.progress(named(text)),
            starter=source.starter,
        )
    except ConfigError as error:
        raise ConfigError(named(str(error))) from error
    summary: Mapping[str, Any] = json.loads(lines[0])
    return summary


def _put_length(draft: _Draft, summary: Mapping[str, Any], limit: int | None) -> None:
    """Sets the tokens of a row: the longest sample if the model can take it, or a share of the
    text.
    """
    most = min(limit or _MOST_LENGTH, _MOST_LENGTH)
    bound = f"the model takes {limit:,}" if limit else "config.json names no limit of the model"
    if summary["records"] is None:
        length = most
        while length > _SHORTEST_LENGTH and summary["tokens"] // length < 4 * _BATCH:
            length //= 2
        more = "" if summary["whole"] else "more than "
        words = f"tokens of a row; the text has {more}{summary['tokens']:,}, {bound}"
    else:
        longest = summary["lengths"]["max"]
        length = _SHORTEST_ROW
        while length < max(longest, _SAMPLES_A_ROW * summary["lengths"]["p50"]):
            length *= 2
        length = min(length, most)
        fits = longest <= length and summary["whole"]
        lost = "" if fits else "; longer ones lose their end, see data.too_long"
        read = "" if summary["whole"] else f" of the first {summary['records']:,} records"
        words = f"tokens of a row; the longest sample{read} has {longest:,}, {bound}{lost}"
    draft.put("data.sequence_length", length, words)


def _put_steps(draft: _Draft, summary: Mapping[str, Any]) -> None:
    """Sets passes and batch."""
    rows = summary["rows_per_epoch"]
    batch = _BATCH
    least = PAIR if _trains_on_pairs(draft) else 1
    while batch > least and rows < 4 * batch:
        batch //= 2
    kind = "text" if summary["records"] is None else "pairs" if least == PAIR else "samples"
    epochs = _EPOCHS[kind]
    steps = -(-rows * epochs // batch)
    more = "" if summary["whole"] else "more than "
    draft.put("train.epochs", epochs, f"passes over the data: {more}{steps:,} steps")
    draft.put("train.global_batch", batch, f"rows of a step; a pass has {more}{rows:,}")


def _costs(model: Path, draft: _Draft) -> Estimate | None:
    """Returns the estimate of memory and parameters; None if no plan fits."""
    described = Description(
        model=str(model),
        sequence_length=draft.values["data"]["sequence_length"],
        global_batch=draft.values["train"]["global_batch"],
        micro_batch=str(PAIR if _trains_on_pairs(draft) else 1),
        dtype=draft.values["model"]["dtype"],
        settings=tuple(f"adapter.{key}={v}" for key, v in draft.values.get("adapter", {}).items()),
    )
    with suppress(CapacityError):
        return estimate(described)
    return None


def _put_rate(draft: _Draft, costs: Estimate | None) -> None:
    is_small = costs is not None and costs.run.table.num_parameters < _SMALL_MODEL
    rate, of = (2.0e-5 if is_small else 1.0e-5), "all parameters"
    if _trains_on_pairs(draft):
        rate, of = 1.0e-6, "pairs of answers"
    if "adapter" in draft.values:
        rate, of = float(f"{10 * rate:.1e}"), "adapters"
    draft.put("optimizer.lr", rate, f"usual for {of}; half or double if the loss says so")
    draft.put("optimizer.schedule", "cosine", "the rate falls along a cosine")
    draft.put("optimizer.warmup_steps", 0.03, "share of the steps in which the rate rises")


def _put_device(draft: _Draft, gpu: FoundGpu | None) -> None:
    if gpu is None:
        draft.put("cluster.device", "cpu", "the driver names no GPU here; cuda computes on GPUs")
        rows, what = (PAIR, "a pair of") if _trains_on_pairs(draft) else (1, "")
        comment = f"{what} rows that are computed at once; more need more memory".strip()
        draft.put("train.micro_batch", rows, comment)
        return
    memory = human_bytes(gpu.memory_bytes)
    draft.put("cluster.device", "cuda", f"{gpu.name}, {memory}; schedule and micro-batch fit it")


def _head(start: Start, summary: Mapping[str, Any], costs: Estimate | None) -> list[str]:
    """Returns comments on model, data and memory."""
    lines = [f"# Made by penstock init {start.words}"]
    if costs is not None:
        lines.append(f"# model: {costs.run.table.num_parameters:,} parameters")
    part = "" if summary["whole"] else "of the data the first part was read: "
    if summary["records"] is None:
        lines.append(
            f"# data: {part}{summary['tokens']:,} tokens of text; all of them count in the loss"
        )
    else:
        share = summary["counted_tokens"] / summary["tokens"]
        lines.append(
            f"# data: {part}{summary['records']:,} records, {summary['samples']:,} samples;"
            f" {summary['tokens']:,} tokens, {share:.1%} count in the loss"
        )
    if costs is not None:
        figures = costs.to_dict()
        shm = os.statvfs("/dev/shm")
        needed, free = figures["shm"]["total"], shm.f_bavail * shm.f_frsize
        lines += [
            f"# memory: weights and optimizer take {human_bytes(needed)} of /dev/shm"
            f" ({human_bytes(free)} were free at the writing)",
            f"# disk: a saved state takes {human_bytes(figures['saved_state'])}",
        ]
    target = start.target
    return [
        *lines,
        f"# next: penstock data {target}, then penstock train {target}",
        "# All keys: penstock config",
    ]


def _lines(draft: _Draft) -> list[str]:
    """Returns the sections with their comments."""
    lines: list[str] = []
    for section in ("run", "model", "adapter", "data", "train", "eval", "optimizer", "cluster"):
        if section not in draft.values:
            continue
        lines.append(f"{section}:")
        for name, value in draft.values[section].items():
            shown = yaml.safe_dump(value, default_flow_style=True, width=10_000).split("\n...")[0]
            comment = draft.comments.get(f"{section}.{name}", "")
            text = f"  {name}: {shown.strip()}"
            lines.append(f"{text:<{_MARGIN}}  # {comment}" if comment else text)
    return lines
