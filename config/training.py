"""The sections about the training: run, model, train, optimizer.

Each key is described once, here. ``description`` explains it in ``penstock config``,
``docs/CONFIGURATION.md`` and the JSON schema. :class:`~.values.Accepts` puts accepted values into
words where types and limits are unclear. :class:`~.values.Unit` names the unit.
:mod:`penstock.config.schema` checks conditions across sections. The sections about schedule and
machines are in :mod:`penstock.config.execution`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from penstock.config.evaluation import METRIC_WORDS, StopEarlyConfig
from penstock.config.optimizers import (
    Hyperparameter,
    OptimizerName,
    labels_with,
    names_that_decouple,
)
from penstock.config.values import (
    AUTO,
    Accepts,
    Attempts,
    Cores,
    LeftShare,
    MicroBatch,
    Patterns,
    Sequences,
    Steps,
    StepsOrShare,
    Unit,
    check_patterns,
)
from penstock.config.words import Section
from penstock.shm.table import DType

ONE_MODEL = "give exactly one of model.hf and model.path"

AttentionName = Literal["auto", "sdpa", "flash", "efficient", "cudnn", "math", "cudnn-flash"]

ON_GPUS = ("efficient", "cudnn", "cudnn-flash")
"""Values of `model.attention` that CPUs have no kernels for."""


MAX_RUN_NAME = 64
"""Most characters of `run.name`."""


class RunConfig(Section):
    """Identity and place of a run."""

    name: Annotated[
        str,
        Accepts(f"a text of 1 to {MAX_RUN_NAME} letters, digits, dots, underscores and hyphens"),
    ] = Field(
        default="penstock",
        pattern=rf"^[A-Za-z0-9._-]{{1,{MAX_RUN_NAME}}}$",
        description="Name of the run in commands and metrics.",
    )
    seed: int = Field(
        default=1234,
        ge=0,
        lt=2**63,
        description="Initial weights, the order of the data and dropout follow from the seed.",
    )
    dir: Path | None = Field(
        default=None,
        description="Directory of the run's files. Unset: runs/NAME below the current folder. A"
        " run in the directory is continued. Several nodes use the same directory, at the same"
        " path.",
    )
    strict: bool = Field(
        default=False,
        description="Refuses to continue a run if anything differs from its last start that can"
        " change rounding: the version of torch or transformers, the processor, the number of"
        " CPUs for threads, the GPUs, or facts of a worker's device (CUDA, cuDNN, attention"
        " packages, MIG profile). False: a line reports the difference. `--strict` sets it.",
    )


class ModelConfig(Section):
    """The model: give `hf` or `path`. Emulated devices know their model by themselves."""

    hf: Annotated[
        dict[str, Any] | None,
        Accepts("a mapping such as {model_type: llama, hidden_size: 256}, or null"),
    ] = Field(
        default=None,
        description="A Hugging Face configuration; the model is trained from the start.",
    )
    path: Path | None = Field(
        default=None,
        description="A local directory as the Hub has them: `config.json`, safetensors files, and"
        " the tokenizer. Or a name of the Hub such as `Qwen/Qwen3-0.6B`, also with `@revision`: the"
        " first start fetches the files, and the run keeps the commit. The files are those that"
        " transformers takes: `transformers_weights` of `config.json`, else `model.safetensors`,"
        " else the shards that its index names. Every machine reads it.",
    )
    dtype: DType = Field(
        default=DType.FP32, description="Type in which weights are stored and sent to devices."
    )
    imports: Annotated[tuple[str, ...], Accepts("a list of modules such as [fla]")] = Field(
        default=(),
        description="Python modules that every process with the model imports first: those that"
        " register new types of model with transformers. Every machine has them.",
    )
    import_path: Path | None = Field(
        default=None,
        description="The folder of your modules, those of `model.imports` and `data.objective`:"
        " relative to the configuration file, by default the folder of that file. Python searches"
        " it last, after its own folders. The folder from which you start Penstock is not"
        " searched.",
    )
    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="Compiles each kind of layer to one graph (torch.compile) before the first"
        " step. auto: on GPUs, if all kinds of layers are one graph each, and the plan drops no"
        " operators; plans that do, and CPUs, run the layers as they are. A run keeps what auto"
        " chose. true: for every device.",
    )
    attention: AttentionName = Field(
        default="auto",
        description="Kernels of attention, chosen before the first step; a run keeps its choice."
        " auto: sdpa, and with `deterministic: false` cudnn on Hopper if all layers can use it."
        " sdpa: torch chooses for each call. flash (FlashAttention-2), efficient, cudnn, math: one"
        " kernel of torch for all calls. cudnn-flash: cuDNN's forward with the deterministic"
        " backward of FlashAttention-2. A start is refused if a layer cannot use the named kernel."
        " CPUs have sdpa, flash and math.",
    )
    deterministic: bool = Field(
        default=True,
        description="Computes with kernels that give the same bits each time, so that a repeated"
        " attempt ends with the bytes of an undisturbed one. Without, GPUs may use faster ones"
        " (attention's backward), and operators that have no such kernel.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.hf is not None and self.path is not None:
            raise ValueError(ONE_MODEL)
        if self.hf is not None and "model_type" not in self.hf:
            raise ValueError("model.hf needs model_type, such as llama, gpt2, qwen2, mistral")
        return self

    @model_validator(mode="after")
    def _attention_that_repeats_bits(self) -> ModelConfig:
        if self.attention == "cudnn" and self.deterministic:
            raise ValueError(
                "model.attention cudnn: the backward of cuDNN repeats no bits, and"
                " model.deterministic is true; use attention cudnn-flash or auto, or deterministic"
                " false"
            )
        return self


class TrainConfig(Section):
    """Length and batch of the run."""

    steps: Steps = Field(
        default=200,
        ge=1,
        description="Committed steps after which the run ends. Give `steps` or `epochs`.",
    )
    epochs: Annotated[float | None, Unit("passes over the training data")] = Field(
        default=None,
        gt=0.0,
        le=1.0e6,
        description="Passes over the training rows after which the run ends, in place of `steps`:"
        " the preparation counts the rows, and the steps are rounded up. An alert takes this"
        " number, too, in place of `data.passes`.",
    )
    global_batch: Sequences = Field(
        default=8,
        ge=1,
        description="Sequences of a step, over all replicas and micro-batches.",
    )
    micro_batch: MicroBatch = Field(
        default=1,
        description="Sequences that a device computes at once; divides `global_batch`. With auto,"
        " the preparation chooses the number together with the schedule, and a run that has"
        " started keeps the number. Unset, auto with one worker on a GPU.",
    )
    clip_grad_norm: float | None = Field(
        default=1.0,
        gt=0.0,
        description="Limit of the gradients' global norm: larger gradients are scaled down to it;"
        " null: no clipping.",
    )
    loss_mean: Literal["tokens", "samples"] = Field(
        default="tokens",
        description="Mean that is the loss of a step. tokens: over all counted tokens of the global"
        " batch. samples: over the tokens of each sample first (a document of a row, else the row),"
        " then over the samples; samples without counted tokens are left out. Evaluations have the"
        " mean over tokens.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each label that all tokens of the vocabulary have in equal parts, as"
        " in torch.nn.CrossEntropyLoss. Losses of steps are smoothed; those of evaluations are"
        " not.",
    )
    freeze: Annotated[
        tuple[str, ...],
        AfterValidator(check_patterns),
        Accepts("a list of regular expressions such as [^model.embed]"),
    ] = Field(
        default=(),
        description="Regular expressions: parameters with a matching name are not trained.",
    )
    only: Annotated[
        tuple[str, ...],
        AfterValidator(check_patterns),
        Accepts("a list of regular expressions such as [^lm_head]"),
    ] = Field(
        default=(),
        description="Regular expressions: only parameters with a matching name are trained, in"
        " place of `freeze`. Not with `adapter`, which trains its own.",
    )
    eval_every: Steps = Field(default=0, ge=0, description="Steps between evaluations; 0: never.")
    eval_batches: Annotated[int, Unit("global batches")] = Field(
        default=2, ge=1, description="Batches of the held-out data in an evaluation."
    )
    save_every: Steps = Field(
        default=0,
        ge=0,
        description="Steps between saves of the state; 0: only when the run ends.",
    )
    keep_snapshots: Annotated[int, Unit("saved states")] = Field(
        default=2, ge=1, description="Number of saved states that are kept; older ones are removed."
    )
    keep_every: Steps = Field(
        default=0,
        ge=0,
        description="Saved states with a step that is a multiple of this are kept, too; 0: none.",
    )
    keep_best: Annotated[str | None, Accepts(f"{METRIC_WORDS}, or null")] = Field(
        default=None,
        description="The best saved state by this metric of an evaluation stays, also"
        " beyond `keep_snapshots`. An evaluation that is the best so far saves the state, too."
        " Perplexity and loss are best where they are least. Without a name, the metric is that of"
        " the only set, or of the set named eval.",
    )
    stop_early: Annotated[
        StopEarlyConfig | None, Accepts("a mapping such as {metric: loss, patience: 3}, or null")
    ] = Field(
        default=None, description="Ends the run when a metric of an evaluation stops improving."
    )
    max_skips: Attempts = Field(
        default=20,
        ge=1,
        description="Most attempts in a row with an overflow. One more ends the run, but not"
        " before the lowest loss scale was tried.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"train.steps {self.steps} and train.epochs {self.epochs:g} both set the length of"
                " the run; remove one (train.epochs: null leaves the steps)"
            )
        return self

    @model_validator(mode="after")
    def _one_choice(self) -> TrainConfig:
        if self.only and self.freeze:
            raise ValueError(
                f"train.only {list(self.only)} and train.freeze {list(self.freeze)} both choose the"
                " parameters that are trained; remove one"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        if self.micro_batch and self.global_batch % self.micro_batch:
            raise ValueError(
                f"train.global_batch {self.global_batch} is not divisible by"
                f" train.micro_batch {self.micro_batch}"
            )
        return self

    @property
    def length_key(self) -> str:
        """Returns the key that sets the length of the run."""
        return "train.steps" if self.epochs is None else "train.epochs"

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per attempt; those of one sequence where the size is not chosen yet."""
        return self.global_batch // (self.micro_batch or 1)


class GroupConfig(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Patterns = Field(
        description="Regular expressions, as of `train.freeze`: parameters belong to the group if"
        " one of them matches a part of the name."
    )
    rate: Annotated[
        float, Accepts("a number above 0 (`train.freeze` keeps parameters as they are)")
    ] = Field(
        default=1.0,
        gt=0.0,
        description="Multiplies the learning rate of every step, after `schedule` and `min_lr`.",
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0.0,
        description="Weight decay of all parameters of the group, with one axis or more; unset, as"
        " without the group.",
    )

    @model_validator(mode="after")
    def _decides(self) -> GroupConfig:
        if not {"rate", "weight_decay"} & self.model_fields_set:
            raise ValueError(
                f"optimizer.groups: the group of {', '.join(self.match)} has neither rate nor"
                " weight_decay; give one of them (rate: 1.0 leaves parameters out of later groups)"
            )
        return self


class OptimizerConfig(Section):
    """The optimizer, its learning-rate schedule, and the CPU cores that run it."""

    name: OptimizerName = Field(
        default=OptimizerName.ADAMW,
        description=f"{names_that_decouple()} decouple weight decay from the gradient, the others"
        " add it.",
    )
    lr: float = Field(
        default=3.0e-4,
        gt=0.0,
        description="The learning rate after warmup, the highest.",
    )
    betas: Annotated[
        tuple[float, float], Accepts("two numbers, 0 or more and below 1, such as [0.9, 0.95]")
    ] = Field(
        default=(0.9, 0.95),
        description=f"Used by {labels_with(Hyperparameter.BETAS)}; Lion usually has 0.9 and 0.99.",
    )
    momentum: float = Field(
        default=0.9, ge=0.0, lt=1.0, description=f"Used by {labels_with(Hyperparameter.MOMENTUM)}."
    )
    eps: float = Field(
        default=1.0e-8, gt=0.0, description=f"Used by {labels_with(Hyperparameter.EPS)}."
    )
    weight_decay: float = Field(
        default=0.1, ge=0.0, description="Weight decay acts on parameters with two or more axes."
    )
    groups: Annotated[
        tuple[GroupConfig, ...],
        Accepts("a list such as [{match: embed_tokens, rate: 0.1, weight_decay: 0.0}]"),
    ] = Field(
        default=(),
        description="Parameters with another learning rate or weight decay. A parameter belongs to"
        " the first group that matches one of its names; a tied one has several.",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Curve of the learning rate from `lr`, after warmup, to `min_lr` at the end."
        " wsd (warmup, stable, decay): `lr` until the last `decay_steps`.",
    )
    curve: Literal["penstock", "transformers"] = Field(
        default="penstock",
        description="Point of the curve that a step has. penstock: warmup begins above 0, and the"
        " last step has `min_lr`. transformers: the rates of transformers' schedules, one point"
        " earlier: the first step has 0 with warmup, and `lr` without.",
    )
    warmup_steps: StepsOrShare = Field(
        default=0,
        description="Steps in which the learning rate rises linearly; below 1, a share of"
        " `train.steps`, rounded up.",
    )
    decay_steps: StepsOrShare = Field(
        default=0.1,
        description="With wsd: last steps, in which the learning rate falls; below 1, a share of"
        " `train.steps`, rounded up.",
    )
    decay_type: Literal["cosine", "linear", "1-sqrt"] = Field(
        default="cosine", description="With wsd: form of the fall."
    )
    min_lr: float = Field(default=0.0, ge=0.0, description="The lowest learning rate.")
    grad_dtype: DType = Field(
        default=DType.FP32, description="Type in which gradients reach the optimizer."
    )
    rollback: Literal["exact", "arithmetic"] = Field(
        default="exact",
        description="exact: weights are computed before the state, so that nothing has to be"
        " undone. arithmetic: steps are taken in place, and inverted if they do not count (SPipe,"
        " DeepSpeed); one copy of the gradients is enough, but bits are lost. Not with fp16,"
        " `settle: early`, `master: split`, or updates on devices.",
    )
    settle: Literal["auto", "advance", "early"] = Field(
        default="auto",
        description="Time at which the state of blocks on the CPU takes a committed step."
        " advance: together with the next step's preview. early: during the next forward, which"
        " shortens the tail after the last gradient. auto: the planner chooses how many of the"
        " last blocks settle early, from the rates of `schedule.profile` or of an emulated"
        " device; without rates all blocks advance. Same bits; `penstock plan` shows the choice.",
    )
    master: Literal["fp32", "split"] = Field(
        default="fp32",
        description="split, for bf16 models: the weights are the upper halves of the fp32"
        " masters, rounded half up, and only the lower halves are stored in addition: 2 bytes per"
        " parameter less. Blocks that settle early also have one copy of the gradients, if their"
        " owner's node computes all of them: 16 instead of 20 bytes per parameter with bf16"
        " gradients. Rollback stays exact.",
    )
    threads: Annotated[int, Unit("threads")] = Field(
        default=0,
        ge=0,
        description="Threads of each node's optimizer; 0: one for each physical core.",
    )
    cores: Cores = Field(
        default="auto",
        description="CPUs to which the optimizer's threads are pinned, one thread each. auto: as"
        " many as `threads`, with the share `leave_cores` left to the workers; `penstock doctor"
        " CONFIG` shows them.",
    )
    leave_cores: LeftShare = Field(
        default="auto",
        description="Share of the physical cores that is left to workers. auto: one core for each"
        " GPU worker, and none if workers compute on the cores.",
    )
    speculate: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Computes weights before the gradients' norm is known. auto: as long as few"
        " gradients are clipped. Same bits.",
    )
    initial_loss_scale: float = Field(
        default=65536.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Initial loss scale of fp16 models. Each attempt with an overflow halves it.",
    )
    loss_scale_min: float = Field(
        default=1.0, gt=0.0, description="Lowest loss scale of fp16 models."
    )
    loss_scale_growth_interval: Steps = Field(
        default=2000,
        ge=1,
        description="Steps in a row without overflow after which the loss scale of fp16 models"
        " doubles.",
    )

    @model_validator(mode="after")
    def _in_place(self) -> OptimizerConfig:
        if self.rollback == "arithmetic" and self.settle == "early":
            raise ValueError(
                "optimizer.rollback arithmetic steps in place, and optimizer.settle early leaves"
                " the state for later; use settle advance, or rollback exact"
            )
        return self

    @model_validator(mode="after")
    def _values(self) -> OptimizerConfig:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"optimizer.betas {list(self.betas)}: each must be in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr {self.min_lr} is above optimizer.lr {self.lr}")
        if self.min_lr and (self.curve, self.schedule) == ("transformers", "linear"):
            raise ValueError(
                f"optimizer.min_lr {self.min_lr}: transformers' linear schedule falls to 0; use"
                " min_lr 0, schedule cosine or wsd, or curve penstock"
            )
        if self.cores != AUTO and (self.threads or self.leave_cores != AUTO):
            raise ValueError(
                f"optimizer.cores {list(self.cores)} says which cores, one thread each; leave out"
                " optimizer.threads and optimizer.leave_cores, or use cores: auto"
            )
        if self.loss_scale_min > self.initial_loss_scale:
            raise ValueError(
                f"optimizer.loss_scale_min {self.loss_scale_min} is above"
                f" optimizer.initial_loss_scale {self.initial_loss_scale}"
            )
        return self
