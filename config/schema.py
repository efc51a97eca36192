"""The whole configuration: YAML -> typed, frozen, fully resolved.

Unknown keys and impossible values raise :class:`~penstock.host.errors.ConfigError` that names
the key, the value and what would be accepted. The keys are in
:mod:`penstock.config.training` and :mod:`penstock.config.execution`. What must
fit together with the model (stages against blocks, workers against stages) is checked by
:func:`penstock.planner.planning.configured.build_plan`, which knows the block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from penstock.config.adapter import AdapterConfig
from penstock.config.data import DataConfig
from penstock.config.evaluation import (
    EVAL,
    EvalConfig,
    EvaluationMetric,
    EvaluationSet,
    Judge,
    metrics_of,
)
from penstock.config.execution import (
    ClusterConfig,
    EmulationConfig,
    MemoryConfig,
    ObservabilityConfig,
    ScheduleConfig,
)
from penstock.config.old_keys import TRACKER_KEYS, Hint, new_place, with_new_names
from penstock.config.reading import Place, read_mapping
from penstock.config.training import (
    ON_GPUS,
    ONE_MODEL,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from penstock.config.values import AUTO, BYTE, CHOSEN_LATER, DPO, ORPO, PAIR, Accepts
from penstock.config.words import (
    NO_TRANSLATION,
    Section,
    Translation,
    apply_overrides,
    explain,
    override_place,
    unwritten_places,
)
from penstock.host.errors import ConfigError
from penstock.shm.table import DType


class Config(Section):
    """A whole configuration."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    adapter: Annotated[
        AdapterConfig | None,
        Accepts("a mapping such as {r: 16, alpha: 32}, {} with all defaults, or null: no adapter"),
    ] = Field(default=None, description="{} has all defaults, and an empty section is refused.")
    data: DataConfig
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    cluster: ClusterConfig = ClusterConfig()
    memory: MemoryConfig = MemoryConfig()
    emulation: EmulationConfig = EmulationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _one_number_of_passes(self) -> Config:
        epochs, passes = self.train.epochs, self.data.passes
        if epochs not in (None, passes) and "passes" in self.data.model_fields_set:
            raise ValueError(
                f"data.passes {passes:g} and train.epochs {epochs:g} both set the passes over the"
                " data; remove data.passes, an older key for the alert alone"
            )
        return self

    @model_validator(mode="after")
    def _trained_by_an_adapter(self) -> Config:
        if self.adapter is not None and self.train.only:
            raise ValueError(
                f"train.only {list(self.train.only)}: adapter trains its own parameters and those"
                " of adapter.modules_to_save; remove train.only, or name whole modules there"
            )
        return self

    @model_validator(mode="after")
    def _pairs_stay_whole(self) -> Config:
        if not self.trains_on_pairs:
            return self
        train, given = self.train, self.train.model_fields_set
        objective = f"data.objective {self.data.objective}"
        for key in ("global_batch", "micro_batch"):
            if getattr(train, key) % 2 and (key == "global_batch" or key in given):
                size = getattr(train, key)
                raise ValueError(
                    f"train.{key} {size}: with {objective} a pair is two rows, which stay in"
                    f" one micro-batch; use an even number, such as {size + 1}"
                )
        if train.loss_mean != "tokens":
            raise ValueError(
                f"train.loss_mean {train.loss_mean}: {objective} has the mean over pairs; remove"
                " the key"
            )
        if train.label_smoothing:
            remedy = "remove the key"
            if self.data.objective != ORPO:
                remedy = f"data.{self.data.objective}.label_smoothing smooths preferences"
            raise ValueError(
                f"train.label_smoothing {train.label_smoothing:g}: {objective} has no labels to"
                f" smooth; {remedy}"
            )
        if self.cluster.platform.builtin_model:
            raise ValueError(
                f"{objective}: {self.cluster.device!r} makes up its model, which has no"
                " log-probabilities; use a real device"
            )
        return self

    @model_validator(mode="after")
    def _sets_of_their_own(self) -> Config:
        held_out = self.data.eval_path
        for each in self.eval.sets:
            if each.every is None and not self.train.eval_every:
                raise ValueError(
                    f"eval.sets: set {each.name} is never evaluated: give it every, or all sets"
                    " train.eval_every"
                )
            if held_out is not None and each.key == EVAL:
                raise ValueError(
                    f"eval.sets: set {each.name} has no path, and nothing of the training data is"
                    f" held out with data.eval_path {held_out!r}; give the set a path, or remove"
                    " one of the two"
                )
            if held_out is not None and self.train.eval_every and each.name == EVAL:
                raise ValueError(
                    f"eval.sets: the set of data.eval_path {held_out!r} has the name {EVAL}, too;"
                    " give one of the two another name in eval.sets"
                )
        return self

    @model_validator(mode="after")
    def _judged_by_evaluations(self) -> Config:
        self._judge("train.keep_best", self.train.keep_best)
        if self.train.stop_early is not None:
            self._judge("train.stop_early.metric", self.train.stop_early.metric)
        return self

    @model_validator(mode="after")
    def _halves_of_a_master(self) -> Config:
        if self.optimizer.master != "split":
            return self
        if self.model.dtype is not DType.BF16:
            raise ValueError(
                "optimizer.master split has bf16 weights as the upper halves of the master, and"
                f" model.dtype is {self.model.dtype.value}; use model.dtype bf16, or master fp32"
            )
        if self.optimizer.rollback != "exact":
            raise ValueError(
                f"optimizer.rollback {self.optimizer.rollback} steps in place, which overwrites"
                " upper halves that a rollback needs, and optimizer.master is split; use rollback"
                " exact, or master fp32"
            )
        return self

    @model_validator(mode="after")
    def _gradients_of_scaled_losses(self) -> Config:
        if self.optimizer.grad_dtype is DType.FP16 and self.model.dtype is not DType.FP16:
            raise ValueError(
                "optimizer.grad_dtype fp16 needs the loss scale that model.dtype fp16 has, which is"
                f" {self.model.dtype.value}; use bf16 or fp32"
            )
        return self

    @model_validator(mode="after")
    def _mirror_needs_a_partner(self) -> Config:
        if self.memory.mirror == "none":
            return self
        hosts = [node.host for node in self.cluster.nodes]
        if len(hosts) < 2:
            raise ValueError(
                "memory.mirror partner needs another node to keep the replica, and cluster.nodes"
                " has one; name two or more, or use mirror none"
            )
        beside = {a for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True) if a == b}
        shared = sorted(host for host in beside if host != "localhost" and host[:4] != "127.")
        if shared:
            raise ValueError(
                f"memory.mirror partner: a node and its partner, the next one in cluster.nodes, are"
                f" both on {shared[0]}, and would be lost together; order the nodes so that"
                " neighbours have different hosts"
            )
        if self.optimizer.rollback != "exact":
            raise ValueError(
                f"optimizer.rollback {self.optimizer.rollback} keeps one copy of gradients, which"
                " the next attempt overwrites before a partner has them (memory.mirror partner);"
                " use rollback exact, or mirror none"
            )
        return self

    @model_validator(mode="after")
    def _rollback_of_scaled_losses(self) -> Config:
        scaled = DType.FP16 in (self.model.dtype, self.optimizer.grad_dtype)
        if self.optimizer.rollback == "arithmetic" and scaled:
            raise ValueError(
                "optimizer.rollback arithmetic: a dynamic loss scale, which fp16 needs, makes"
                " gradients overflow again and again, and what an overflow does to a state that was"
                " stepped in place no arithmetic brings back; use rollback exact, or bf16"
            )
        return self

    @model_validator(mode="after")
    def _attention_of_the_device(self) -> Config:
        platform, attention = self.cluster.platform, self.model.attention
        if platform.own_memory or platform.builtin_model or attention not in ON_GPUS:
            return self
        raise ValueError(
            f"model.attention {attention} runs on GPUs alone, and cluster.device is"
            f" {self.cluster.device!r}; use attention auto, flash or math, or device cuda"
        )

    @model_validator(mode="after")
    def _modelled_or_real(self) -> Config:
        platform = self.cluster.platform
        if platform.simulated_clock and self.schedule.profile is not None:
            raise ValueError(
                f"schedule.profile = {str(self.schedule.profile)!r}: emulated devices have the"
                " costs that cluster.device names (emulated:FILE.json takes a profile)"
            )
        if not platform.builtin_model and self.model.hf is None and self.model.path is None:
            raise ValueError(ONE_MODEL)
        if not platform.simulated_clock and self.emulation != EmulationConfig():
            raise ValueError(
                f"emulation: is for cluster.device: emulated:…, which is {self.cluster.device!r}"
            )
        return self

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """Returns the sets that the run evaluates: that of ``train.eval_every``, which is named
        ``eval``, unless ``eval.sets`` replaces it; then the sets of ``eval.sets``.
        """
        every, named = self.train.eval_every, self.eval.sets
        sets = []
        if every and (not named or self.data.eval_path is not None):
            batches = self.train.eval_batches
            sets += [
                EvaluationSet(name=EVAL, split=EVAL, every=every, batches=batches, repeats=True)
            ]
        return (
            *sets,
            *(
                EvaluationSet(
                    name=each.name,
                    split=each.key,
                    every=each.every or every,
                    batches=each.batches,
                    repeats=False,
                )
                for each in named
            ),
        )

    @property
    def best_judge(self) -> Judge | None:
        """Returns the metric of ``train.keep_best``, if it is given."""
        return self._judge("train.keep_best", self.train.keep_best)

    @property
    def stop_judge(self) -> Judge | None:
        """Returns the metric of ``train.stop_early``, if it is given."""
        stop = self.train.stop_early
        return None if stop is None else self._judge("train.stop_early.metric", stop.metric)

    def _judge(self, key: str, text: str | None) -> Judge | None:
        """Returns the metric that a key names.

        Raises:
            ValueError: there is no such metric or set, or the run evaluates nothing.
        """
        if text is None:
            return None
        names = [each.name for each in self.evaluation_sets]
        if not names:
            raise ValueError(
                f"{key} {text}: the run evaluates nothing; give train.eval_every or eval.sets, or"
                f" remove the key"
            )
        name, _, metric = text.rpartition(".")
        accepted = metrics_of(pairs=self.trains_on_pairs)
        if metric not in accepted:
            raise ValueError(
                f"{key} {text}: {metric or text!r} is no metric of an evaluation; accepted are"
                f" {', '.join(accepted)}, also with the name of a set"
            )
        if not name and len(names) > 1 and EVAL not in names:
            raise ValueError(
                f"{key} {text}: does not say which set; use one of"
                f" {', '.join(f'{each}.{metric}' for each in names)}"
            )
        chosen = name or (names[0] if len(names) == 1 else EVAL)
        if chosen not in names:
            raise ValueError(
                f"{key} {text}: the run evaluates no set {chosen}; its sets are {', '.join(names)}"
            )
        return Judge(set_name=chosen, metric=EvaluationMetric(metric))

    @property
    def holds_out(self) -> bool:
        """Returns whether some set is the text of ``data.eval_path``, or the end of the training
        data.
        """
        return any(each.split == EVAL for each in self.evaluation_sets)

    @property
    def run_dir(self) -> Path:
        """Returns the directory in which the run keeps its files."""
        return self.run.dir if self.run.dir is not None else Path("runs") / self.run.name

    @property
    def trains_on_pairs(self) -> bool:
        """Returns whether rows are pairs of answers, which share a micro-batch."""
        return self.data.has_pairs

    @property
    def needs_references(self) -> bool:
        """Returns whether the loss takes log-probabilities of the model at the run's start."""
        return self.data.objective == DPO

    @property
    def has_own_modules(self) -> bool:
        """Returns whether the run imports modules of the user's."""
        return bool(self.model.imports) or ":" in self.data.objective

    @property
    def chooses(self) -> bool:
        """Returns whether the preparation has a schedule or a micro-batch to choose."""
        return AUTO == self.schedule.scheme or self.train.micro_batch == CHOSEN_LATER

    def with_micro_batch(self, micro_batch: int) -> Config:
        """Returns the configuration with micro-batches of ``micro_batch`` sequences."""
        train = self.train.model_copy(update={"micro_batch": micro_batch})
        return self.model_copy(update={"train": train})

    @property
    def planned_passes(self) -> float:
        """Returns the passes over the data after which an alert reports more."""
        return self.data.passes if self.train.epochs is None else self.train.epochs

    def with_steps(self, steps: int) -> Config:
        """Returns the configuration with the steps that ``train.epochs`` takes;
        :data:`CHOSEN_LATER` until the preparation has counted the rows.
        """
        train = self.train.model_copy(update={"steps": steps})
        train.model_fields_set.discard("steps")  # epochs stays the one given length
        return self.model_copy(update={"train": train})

    def with_profile(self, profile: Path | None) -> Config:
        """Returns the configuration with another profile, or with its own if that is None."""
        if profile is None:
            return self
        schedule = self.schedule.model_copy(update={"profile": profile})
        return self.model_copy(update={"schedule": schedule})

    def with_defaults(self) -> Config:
        """Returns the configuration with ``auto`` for a schedule and a micro-batch that the user
        left unset, where one worker computes on a GPU. Others keep their defaults.
        """
        platform = self.cluster.platform
        if self.num_workers > 1 or not platform.own_memory or platform.simulated_clock:
            return self
        config, schedule = self, self.schedule
        if "micro_batch" not in self.train.model_fields_set:
            config = config.with_micro_batch(CHOSEN_LATER)
        if not schedule.model_fields_set & {"scheme", "file", "stages_per_device"}:
            schedule = schedule.model_copy(update={"scheme": AUTO})
            config = config.model_copy(update={"schedule": schedule})
        return config

    def with_recomputation(self) -> Config:
        """Returns the configuration with ``recompute: auto`` for a scheme on GPUs, if the user left
        recomputation, passes and file unset.
        """
        platform, schedule = self.cluster.platform, self.schedule
        given = schedule.model_fields_set & {"recompute", "drop", "passes", "file"}
        if given or schedule.scheme == AUTO or not platform.own_memory or platform.simulated_clock:
            return self
        schedule = schedule.model_copy(update={"recompute": AUTO})
        return self.model_copy(update={"schedule": schedule})

    @property
    def mirrors(self) -> bool:
        """Returns whether each node keeps a replica of another one's state."""
        return self.memory.mirror == "partner"

    @property
    def num_workers(self) -> int:
        """Returns the number of workers (devices) of all nodes."""
        return self.cluster.workers * len(self.cluster.nodes)

    @property
    def tokenizer(self) -> str | None:
        """Returns ``byte`` or a path: what ``data.tokenizer`` says or, unset, stands for; ``None``
        where tokens come from a file.
        """
        if self.data.tokens is not None:
            return None
        if self.data.tokenizer is not None:
            return self.data.tokenizer
        # A model that the platform brings takes any tokens.
        model_path = None if self.cluster.platform.builtin_model else self.model.path
        return BYTE if model_path is None else str(model_path)

    def to_yaml(self) -> str:
        """Returns the full configuration, as written to ``RUN_DIR/resolved.yaml``."""
        values = self.model_dump(mode="json")
        observability = values["observability"]
        for key in TRACKER_KEYS:
            if observability[key] is None:
                del observability[key]
        if self.train.epochs is not None:  # both keys follow from it
            del values["train"]["steps"], values["data"]["passes"]
        return yaml.safe_dump(values, sort_keys=False)


def load_config(
    path: Path,
    overrides: tuple[str, ...] = (),
    hint: Hint = lambda text: None,
    translation: Translation = NO_TRANSLATION,
) -> Config:
    """Reads a YAML file and applies ``section.key=value`` overrides (values are YAML). ``hint``
    receives a line for each key with an old name, and ``translation`` answers keys of other
    programs.

    Raises:
        ConfigError: the file cannot be read or is no mapping, or keys are unknown or have
            impossible values; lists all of them.
    """
    document, hints = read_mapping(path), list[str]()
    try:
        data = with_new_names(document.value, hints.append)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    overrides = tuple(_with_new_place(override) for override in overrides)
    data = apply_overrides(data, overrides)
    given: list[Place] = [override_place(override) for override in overrides]
    # Values of the command line stand on no line.
    lines = {
        place: line
        for place, line in ((new_place(place), line) for place, line in document.lines.items())
        if not any(place[: len(key)] == key for key in given)
    }
    lines |= dict.fromkeys(given, 0)
    empty = [
        place
        for place in map(new_place, document.empty)
        if not any(place[: len(key)] == key[: len(place)] for key in given)
    ]
    config = parse_config(
        data,
        source=str(path),
        lines=lines,
        empty=empty,
        folder=path.absolute().parent,
        hint=hints.append,
        translation=translation,
    )
    for text in dict.fromkeys(hints):  # keys that keep their names are seen twice
        hint(text)
    return config


def parse_config(
    data: dict[str, Any],
    *,
    source: str = "configuration",
    lines: Mapping[Place, int] | None = None,
    empty: Sequence[Place] = (),
    folder: Path | None = None,
    hint: Hint = lambda text: None,
    translation: Translation = NO_TRANSLATION,
) -> Config:
    """Validates a nested mapping; ``source`` begins the error, and ``lines`` has the lines of
    values in the source. ``empty`` has places of None that the source leaves out, as ``adapter:``
    does. ``model.import_path`` is relative to ``folder``, by default the current folder. ``hint``
    and ``translation``: see :func:`load_config`.

    Raises:
        ConfigError: names every offending key with its value and the accepted values.
    """
    unwritten = unwritten_places(empty, Config)
    try:
        config = Config.model_validate(with_new_names(data, hint))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except ValidationError as error:
        words = explain(error.errors(), Config, lines, translation, unwritten)
        raise ConfigError(f"{source}: {words}") from error
    if unwritten:
        raise ConfigError(f"{source}: {explain((), Config, lines, translation, unwritten)}")
    if config.train.epochs is not None:
        config = config.with_steps(CHOSEN_LATER)
    if config.trains_on_pairs and "micro_batch" not in config.train.model_fields_set:
        config = config.with_micro_batch(PAIR)
        config.train.model_fields_set.discard("micro_batch")
    if not config.has_own_modules:
        return config
    path = (folder or Path.cwd()) / (config.model.import_path or "")
    model = config.model.model_copy(update={"import_path": path})
    return config.model_copy(update={"model": model})


def _with_new_place(override: str) -> str:
    """Returns ``section.key=value`` with the new name of an old key."""
    place = override_place(override)
    _, _, value = override.partition("=")
    new = new_place(place)
    return override if new == place else f"{'.'.join(map(str, new))}={value}"
