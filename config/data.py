"""The section about the training data. See :mod:`penstock.config.training` for the conventions."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.splits import EXAMPLES, Split
from penstock.config.values import (
    DPO,
    MASKED,
    NEXT_TOKEN,
    ORPO,
    PAIR_OBJECTIVES,
    RECORD_OBJECTIVES,
    ROW_OBJECTIVES,
    SIMPO,
    UTF8,
    WEIGHTED,
    Accepts,
    EndTokens,
    Size,
    Unit,
)
from penstock.config.words import Section

COLUMN_NAMES = (
    *("text", "messages", "conversations", "prompt", "completion", "chosen", "rejected"),
    *("query", "response", "system", "history", "tools", "chat_template_kwargs"),
    *("input_ids", "labels", "completion_mask", "assistant_masks", "attention_mask"),
    *("weight", "weights", "role", "content"),
)
"""Names that ``columns`` gives columns of the data."""


class RecordsConfig(Section):
    """Keys of a place with records, and of the way to read them."""

    path: str | None = Field(
        default=None,
        description="A file, folder or glob, as `data.path`; or a data set of the Hub, with"
        " `split`: `org/name`, `org/name@revision` or `org/name@main/FOLDER`.",
    )
    registry: str | None = Field(
        default=None,
        description="LLaMA-Factory's `dataset_info.json`, in place of `path`. Its entry decides on"
        " file, format, columns and roles; files are relative to the registry's folder.",
    )
    format: Literal[
        "auto", "text", "chat", "completion", "alpaca", "stanford", "tokens", "preference"
    ] = Field(
        default="auto",
        description="What a record holds. text: `text`. chat: `messages` or `conversations`."
        " completion: `prompt` and `completion`. alpaca: `instruction`, `input` and `output`, as a"
        " conversation. stanford: the same in Stanford's fixed form of text. tokens: `input_ids`,"
        " and `labels` or masks: `assistant_masks`, and `completion_mask` unless `data.train_on` is"
        " all; 0 at the end of `attention_mask` is padding. preference: `chosen` and `rejected`,"
        " with `prompt` unless both begin with it. auto: by the columns of each record. With an"
        " objective of pairs, chat and alpaca have the prompt of a conversation, and `chosen` and"
        " `rejected` as its answers.",
    )
    columns: Annotated[
        dict[str, str | None], Accepts("a mapping such as {messages: dialog, system: null}")
    ] = Field(
        default={},
        description="Column of the files by the name in the format's words."
        " role and content name the keys of a message. null: the format has no such column, or the"
        " data's column of this name is left out.",
    )
    roles: Annotated[dict[str, str], Accepts("a mapping such as {human: user, bot: assistant}")] = (
        Field(default={}, description="Role of the chat template by the role in the files.")
    )
    split: Annotated[str | None, Accepts(f"a split or a part, such as {EXAMPLES}")] = Field(
        default=None,
        description="A split of a folder of files named by split (`train.jsonl`,"
        " `data/test-00000-of-00002.parquet`, `validation/a.jsonl`) or of a folder of a"
        " DatasetDict, as datasets names them. Brackets take a part by percent or records; without"
        " a name, of all files. Unset, all files, and the split train of a DatasetDict.",
    )
    limit: Annotated[int | None, Unit("records")] = Field(
        default=None, ge=1, description="So many records from the start; unset, all."
    )

    @field_validator("columns")
    @classmethod
    def _known_names(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for name, column in value.items():
            if column is not None and name not in COLUMN_NAMES:
                raise ValueError(
                    f"no format reads the name {name!r}; names are {', '.join(COLUMN_NAMES)}, as in"
                    f" {{prompt: {name}}}; {{{name}: null}} leaves a column out"
                )
        return value

    @field_validator("split")
    @classmethod
    def _known_form(cls, value: str | None) -> str | None:
        if value is not None:
            Split.parse(value)
        return value

    def given(self, *keys: str) -> list[str]:
        """Returns those of the keys that have another value than their default."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].default]


ENTRY_DECIDES = ("format", "columns", "roles", "split")
"""Keys of records that the entry of a registry has in their place."""


class SourceConfig(RecordsConfig):
    """Records of one file, folder or glob, or of a data set in LLaMA-Factory's registry."""

    name: str | None = Field(default=None, description="With `registry`: the entry's name.")
    weight: float = Field(
        default=1.0,
        gt=0.0,
        description="Each pass takes every record so often. The seed draws the records of a"
        " fraction once, at the preparation.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> SourceConfig:
        if (self.path is None) == (self.registry is None):
            raise ValueError("give exactly one of path and registry in each of data.sources")
        if (self.registry is None) != (self.name is None):
            raise ValueError(
                "data.sources: registry and name go together, as in {registry:"
                " data/dataset_info.json, name: my_chats}"
            )
        given = self.given(*ENTRY_DECIDES)
        if self.registry is not None and given:
            raise ValueError(
                f"data.sources: {', '.join(given)}: the entry {self.name!r} of the registry decides"
                " that; change the entry, or give path in place of registry"
            )
        return self


class DpoConfig(Section):
    """Direct preference optimization (Rafailov et al. 2023), with `data.objective: dpo`.

    A record has a prompt, a chosen and a rejected answer. Each answer is a row, and both rows of a
    pair are in one micro-batch. Dropout is off.
    """

    beta: float = Field(
        default=0.1,
        gt=0.0,
        description="Factor of the log-probabilities' ratios to those of the model at the start:"
        " the greater, the closer the model stays.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=0.5,
        description="Share of pairs that are taken for swapped (conservative DPO).",
    )


_LIKELIHOOD_MEAN = (
    "The mean of the likelihood term. tokens: over the tokens of all chosen rows of a step, as in"
    " TRL. samples: over the pairs, of each one's mean over its tokens, as in LLaMA-Factory."
)
_LIKELIHOOD_ON = (
    "Tokens of the likelihood term: all (of prompt and chosen answer), or completion (of the answer"
    " alone)."
)


class OrpoConfig(Section):
    """Odds ratio preference optimization (Hong et al. 2024), with `data.objective: orpo`.

    The loss is `likelihood` times the negative log-likelihood of the chosen rows, less `beta` log
    sigmoid of the log odds ratio of both answers. Odds are those of the answers' mean
    log-probabilities of a token. No reference model takes part.
    """

    beta: float = Field(
        default=0.1, gt=0.0, description="Factor of the odds ratio's loss: lambda in the paper."
    )
    likelihood: float = Field(
        default=1.0, ge=0.0, description="Factor of the likelihood term; ORPO has 1."
    )
    likelihood_on: Literal["all", "completion"] = Field(
        default="all",
        description=f"{_LIKELIHOOD_ON} TRL has all, LLaMA-Factory completion.",
    )
    likelihood_mean: Literal["tokens", "samples"] = Field(
        default="tokens", description=_LIKELIHOOD_MEAN
    )


class SimpoConfig(Section):
    """Simple preference optimization (Meng et al. 2024), with `data.objective: simpo`.

    The margin of a pair is `beta` times the difference of both answers' mean log-probabilities of a
    token. No reference model takes part.
    """

    beta: float = Field(
        default=2.0,
        gt=0.0,
        description="Factor of the mean log-probabilities. The paper takes 2 to 10; TRL's default"
        " is 0.1.",
    )
    gamma: float = Field(
        default=1.0,
        ge=0.0,
        description="Margin that a pair should have: the loss is that of the margin less `gamma`."
        " The paper takes about half of `beta`; TRL's default is 0.5.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=0.5, description="Share of pairs that are taken for swapped."
    )
    likelihood: float = Field(
        default=0.0,
        ge=0.0,
        description="Factor of the likelihood term, `cpo_alpha` of TRL, which has 1 by default."
        " SimPO has 0.",
    )
    likelihood_on: Literal["all", "completion"] = Field(
        default="completion", description=_LIKELIHOOD_ON
    )
    likelihood_mean: Literal["tokens", "samples"] = Field(
        default="tokens", description=_LIKELIHOOD_MEAN
    )


class DataConfig(Section):
    """The training data: give `path`, `tokens` or `sources`."""

    path: str | None = Field(
        default=None,
        description="`@stdlib` (the text of Python's own library), or a file, folder or glob of"
        " .txt, .md, .py, .jsonl, .json, .csv and .parquet files, and .gz and .zst of them, or a"
        " folder that datasets' save_to_disk wrote. Of records, the column `text` is read. Hidden"
        " files and folders are left out. The first machine"
        " reads it.",
    )
    sources: Annotated[
        tuple[SourceConfig, ...],
        Accepts("a list of sources such as [{path: chat.jsonl}, {path: rows.parquet, weight: 2}]"),
    ] = Field(
        default=(),
        description="Files of records to fine-tune on, in place of `path` and `tokens`.",
    )
    chat_template: str = Field(
        default="model",
        description="The Jinja template that makes text of conversations: model (that of the"
        " tokenizer), chatml, or the path of a file.",
    )
    chat_template_kwargs: Annotated[
        dict[str, Any], Accepts("a mapping such as {enable_thinking: false}")
    ] = Field(default={}, description="Variables of the chat template.")
    special_in_text: bool = Field(
        default=False,
        description="The text of a special token in a message, such as `<|im_end|>`, becomes that"
        " token, as in TRL. Otherwise it stays text, so that no message can end a turn. Plain"
        " texts, prompts and completions always have special tokens of such texts.",
    )
    turns: Literal["auto", "all", "each"] = Field(
        default="auto",
        description="Samples of a conversation. all: one, of which all turns of the assistant"
        " count. each: one for each turn of the assistant, which ends there. auto: all if the"
        " template marks the assistant's turns, else each.",
    )
    train_on: Literal["auto", "all", "completion", "assistant", "last"] = Field(
        default="auto",
        description="Tokens that count in the loss: all, the completion of a prompt, the"
        " assistant's turns, or its last turn. auto: all of a text, the completion of a prompt,"
        " and the assistant's turns of a conversation. A message's own `train` or `weight` (0 or"
        " 1) wins.",
    )
    packing: Literal["auto", "none", "best-fit", "wrapped"] = Field(
        default="auto",
        description="How samples fill rows of `sequence_length` tokens. none: a row for each"
        " sample. best-fit: whole samples share rows, and attention and positions keep them apart."
        " wrapped: all tokens form one text, which is cut into rows; of `sources`, records of text"
        " and ready ids. auto: wrapped for `path` with text and `tokens`, best-fit otherwise; none"
        " if samples of a row would change each other, which the preparation measures.",
    )
    packing_window: Annotated[int | None, Unit("samples")] = Field(
        default=None,
        ge=1,
        description="With best-fit: so many samples in a row share rows; unset, all. TRL has 1000.",
    )
    too_long: Literal["truncate", "split", "drop", "refuse"] = Field(
        default="truncate",
        description="A sample longer than a row loses its end (truncate), makes several samples"
        " (split), is left out (drop), or ends the start with an error (refuse).",
    )
    bad_records: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="A record that cannot be read as its format says ends the start with an error,"
        " or is left out and counted.",
    )
    encoding: Annotated[str, Accepts("a codec of Python for text, such as latin-1 or utf-16")] = (
        Field(
            default=UTF8,
            description="The files of `path` and `eval_path` are in this encoding; `@stdlib` is in"
            " UTF-8.",
        )
    )
    tokens: Path | None = Field(
        default=None,
        description="A binary file of token numbers, as of `token_dtype`. Every machine reads it.",
    )
    token_dtype: Literal["uint16", "uint32"] = Field(
        default="uint16", description="The numbers in `tokens` have this type, little-endian."
    )
    tokenizer: str | None = Field(
        default=None,
        description="byte, or a tokenizer.json or the folder of one. Unset, that of `model.path`;"
        " byte for a model made from `model.hf`.",
    )
    bos: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether each document of text begins with the tokenizer's tokens for a"
        " beginning. auto: with the tokens that the tokenizer puts in front when it adds special"
        " tokens; true: with those, else with its bos or cls token; false: with none.",
    )
    eos: EndTokens = Field(
        default="auto",
        description="Tokens that end a document. auto: the tokenizer's end token, and for `tokens`"
        " every `eos_token_id` of the model. Otherwise tokens by text or number: the first one is"
        " put after each document of text, and each one ends a document for `document_masks`."
        " false: none.",
    )
    sequence_length: Annotated[int, Unit("tokens")] = Field(
        default=256, ge=1, description="Tokens of each training sequence."
    )
    objective: Annotated[
        str,
        Accepts(
            "next-token, masked, weighted, dpo, orpo, simpo, or a function such as"
            " package.module:name"
        ),
    ] = Field(
        default=NEXT_TOKEN,
        pattern=rf"^({NEXT_TOKEN}|{MASKED}|{WEIGHTED}|{'|'.join(PAIR_OBJECTIVES)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="What is predicted of a sequence: each next token; with encoders such as bert,"
        " masked tokens (drawn again in each pass); with weighted, each next token, with a factor"
        " of its loss: the record's columns `weight` and `weights` (one for each of `input_ids`);"
        " with dpo, orpo and simpo, the better of two answers (`data.dpo`, `data.orpo`,"
        " `data.simpo`);"
        " or what a function says that is given token"
        " numbers of (sequences, `sequence_length` + 1) and returns a `MicroBatch`"
        " (models/data/batch.py).",
    )
    dpo: DpoConfig = Field(
        default=DpoConfig(), description="The loss of pairs, with `objective: dpo`."
    )
    orpo: OrpoConfig = Field(
        default=OrpoConfig(), description="The loss of pairs, with `objective: orpo`."
    )
    simpo: SimpoConfig = Field(
        default=SimpoConfig(), description="The loss of pairs, with `objective: simpo`."
    )
    mask_fraction: float = Field(
        default=0.15,
        gt=0.0,
        lt=1.0,
        description="With masked: share of the tokens that are predicted. Of them 80 % are"
        " replaced by the mask, 10 % by any token, 10 % stay.",
    )
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="With masked: number of the mask token; unset, the tokenizer's.",
    )
    shuffle: bool = Field(
        default=True,
        description="Each pass over the data takes the sequences in an order of its own.",
    )
    passes: float = Field(
        default=1.0,
        gt=0.0,
        description="Planned passes over the training sequences. Training continues beyond them,"
        " and an alert reports it (`penstock docs RUNBOOK`).",
    )
    document_masks: bool = Field(
        default=False,
        description="Tokens attend to those of their own document only. The preparation measures"
        " whether the model keeps documents apart, and refuses the key otherwise.",
    )
    cache_limit: Size = Field(
        default=20 * 2**30,
        description="Tokens made from text are kept for other runs of the same text, in"
        " `$XDG_CACHE_HOME/penstock` (`~/.cache/penstock`). Where all take more than this, the"
        " entries used longest ago are removed; 0: none are kept.",
    )
    eval_path: str | None = Field(
        default=None,
        description="Text for evaluations, as `path`; unset, the end of the training text.",
    )
    eval_fraction: float = Field(
        default=0.02,
        gt=0.0,
        lt=1.0,
        description="Share of the sequences, taken from the end, that is held out when"
        " `train.eval_every` is set and `eval_path` is not.",
    )

    @property
    def has_pairs(self) -> bool:
        """Returns whether records are pairs of answers."""
        return self.objective in PAIR_OBJECTIVES

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            b"a".decode(value)
        except UnicodeDecodeError:
            pass  # one byte is no character: two bytes may be
        except (LookupError, ValueError):
            raise ValueError(f"Python has no encoding of text named {value!r}") from None
        # One name for each codec, so that another spelling is no other encoding.
        name = codecs.lookup(value).name
        if name in ("idna", "punycode"):
            raise ValueError(f"{value!r} is an encoding of host names, not of text")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        given = (self.path is not None, self.tokens is not None, bool(self.sources))
        if sum(given) != 1:
            raise ValueError("give exactly one of data.path, data.tokens and data.sources")
        if self.tokens is not None and self.encoding != UTF8:
            raise ValueError("data.encoding goes with data.path: data.tokens holds numbers")
        if self.tokens is not None and self.bos is True:
            raise ValueError(
                "data.bos = true: goes with data.path; nothing is added to data.tokens"
            )
        ends = self.eos if isinstance(self.eos, tuple) else ()
        texts = [token for token in ends if isinstance(token, str)]
        if self.tokens is not None and texts:
            raise ValueError(
                f"data.eos = {texts[0]!r}: data.tokens holds numbers; give the token's number"
            )
        return self

    @model_validator(mode="after")
    def _one_loss_of_pairs(self) -> DataConfig:
        for name, section in ((DPO, self.dpo), (ORPO, self.orpo), (SIMPO, self.simpo)):
            if name != self.objective and section != type(section)():
                given = ", ".join(sorted(_changed(section)))
                raise ValueError(
                    f"data.{name}: has {given}, and data.objective is {self.objective}; remove"
                    f" data.{name}, or set data.objective: {name}"
                )
        for name, terms in ((ORPO, self.orpo), (SIMPO, self.simpo)):
            unused = {"likelihood_on", "likelihood_mean"} & _changed(terms)
            if unused and not terms.likelihood:
                key = sorted(unused)[0]
                raise ValueError(
                    f"data.{name}.{key} {getattr(terms, key)}: data.{name}.likelihood is 0, so the"
                    f" loss has no likelihood term; remove the key, or set data.{name}.likelihood"
                )
        return self

    @model_validator(mode="after")
    def _rows_of_samples(self) -> DataConfig:
        if self.sources and self.packing == "wrapped" and self.train_on not in ("auto", "all"):
            raise ValueError(
                f"data.train_on {self.train_on}: data.packing wrapped makes one text of all"
                " records, of which every token counts; use packing best-fit or none"
            )
        if self.objective in RECORD_OBJECTIVES:
            self._check_records()
        if self.packing in ("auto", "wrapped"):
            return self
        if self.tokens is not None:
            raise ValueError(
                f"data.packing {self.packing}: data.tokens has no samples, which {self.packing}"
                " keeps whole; use packing wrapped, or data.sources with format tokens"
            )
        if self.objective not in ROW_OBJECTIVES:
            raise ValueError(
                f"data.packing {self.packing} goes with data.objective"
                f" {' or '.join(ROW_OBJECTIVES)}, and it is {self.objective}; use packing wrapped"
            )
        return self

    def _check_records(self) -> None:
        """Refuses data without records for an objective that needs their columns."""
        objective = f"data.objective {self.objective} reads columns of records"
        if self.tokens is not None or str(self.path).startswith("@"):
            raise ValueError(
                f"{objective}, and {'data.tokens' if self.path is None else self.path} has none;"
                " give data.sources"
            )
        if self.has_pairs:
            self._check_pairs()
        if self.packing == "wrapped":
            raise ValueError(
                f"{objective}, and data.packing wrapped makes one text of all records; use packing"
                " best-fit or none"
            )

    def _check_pairs(self) -> None:
        """Refuses values of keys that do not go with pairs of answers."""
        accepted = {
            "packing": ("auto", "none"),
            "train_on": ("auto", "completion"),
            "too_long": ("truncate", "drop", "refuse"),
        }
        for key, values in accepted.items():
            if getattr(self, key) not in values:
                raise ValueError(
                    f"data.objective {self.objective}: data.{key} is {getattr(self, key)}, and each"
                    f" answer of a pair is a row in which the answer counts; use"
                    f" {' or '.join(values)}"
                )
        for number, source in enumerate(self.sources):
            if source.format not in ("auto", "preference", "chat", "alpaca"):
                raise ValueError(
                    f"data.sources[{number}].format {source.format}: data.objective"
                    f" {self.objective} reads pairs of answers; use format preference, chat or"
                    " alpaca"
                )


def _changed(section: Section) -> set[str]:
    """Returns the keys of a section with other values than the defaults."""
    fields = type(section).model_fields
    return {name for name in fields if getattr(section, name) != fields[name].default}
