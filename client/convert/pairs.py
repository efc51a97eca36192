"""Pairs of answers of other trainers: ``data.objective`` dpo, orpo and simpo, with its section."""

from __future__ import annotations

from penstock.client.convert.adapters import drop_used
from penstock.client.convert.keys import (
    Effect,
    Table,
    ValueKind,
    dropped,
    mapped,
    placed,
    switched,
    without,
)
from penstock.client.convert.reading import KeyReading
from penstock.config.values import DPO, ORPO, PAIR_OBJECTIVES, SIMPO

SIGMOID = "sigmoid"
"""The one loss of pairs with a reference."""

ONE_LOSS = (
    "the losses of pairs are those of dpo (sigmoid), orpo and simpo; use one, or train with {}"
)
MEANS = (
    "TRL has the mean of the likelihood term over the tokens of each device's batch, and then over"
    " batches; here it is that over all tokens of a step"
)
MARKS = (
    "TRL puts the tokenizer's bos token first and the end token last, also where tokenizer and chat"
    " template do not"
)
_REFERENCE = "the reference is the model at the start of the run"
_TERM = "the loss of pairs is the sigmoid of DPO alone"
_SECTIONS = "data.dpo data.orpo data.simpo"
BETA_NOTE = "{beta: NUMBER}, in the section of data.objective"
_OTHER_STAGE = "another stage or loss reads the key"

_NO_ALPHA = "no loss has the rewards of AlphaPO; use 0, or train with TRL"

TRL: Table = placed(
    {
        # DPOConfig
        **mapped(ValueKind.NUMBER, beta=0.1, label_smoothing=0.0),
        **dropped(
            Effect.NONE,
            "the start computes the reference once",
            precompute_ref_log_probs=False,
            precompute_ref_batch_size=None,
        ),
        **dropped(Effect.RESULT, "dropout is off with pairs of answers", disable_dropout=True),
        **dropped(
            Effect.RESULT,
            _REFERENCE,
            sync_ref_model=False,
        ),
        **without(
            Effect.NONE, "sync_ref_model is false", "ref_model_mixup_alpha ref_model_sync_steps"
        ),
        **dropped(
            Effect.RESULT,
            "the loss of dpo is the sigmoid",
            f_divergence_type="reverse_kl",
            use_weighting=False,
            ld_alpha=None,
            loss_weights=None,
        ),
        **without(Effect.NONE, "other losses read the key", "f_alpha_divergence_coef discopop_tau"),
        # ORPOConfig and CPOConfig
        **mapped(ValueKind.NUMBER, cpo_alpha=1.0, simpo_gamma=0.5),
        **dropped(Effect.RESULT, _NO_ALPHA, alpha=0.0),
        **dropped(Effect.NONE, "evaluations generate no text", generate_during_eval=False),
        **without(Effect.NONE, "padding does not count", "padding_value"),
        **without(
            Effect.NONE,
            "only encoder-decoders read the key",
            "max_completion_length is_encoder_decoder",
        ),
    },
    {
        "beta": _SECTIONS,
        "label_smoothing": "data.simpo",
        "cpo_alpha": "data.simpo",
        "simpo_gamma": "data.simpo",
    },
    {
        "beta": BETA_NOTE,
        "label_smoothing": "{label_smoothing: SHARE}",
        "cpo_alpha": "{likelihood: NUMBER}",
        "simpo_gamma": "{gamma: NUMBER}",
    },
)
"""Keys of TRL's DPOConfig, ORPOConfig and CPOConfig."""

_DPO_KEYS = (
    *("beta", "precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model"),
    *("disable_dropout", "f_divergence_type", "use_weighting", "ld_alpha", "loss_weights"),
)
"""Keys that of the tuned trainers only those of pairs have."""

_UNREFERENCED_KEYS = (
    *("max_completion_length", "is_encoder_decoder", "padding_value", "generate_during_eval"),
)
"""Keys that ORPOConfig and CPOConfig have, and DPOConfig lacks."""

_SIMPO_KEYS = ("cpo_alpha", "simpo_gamma")
"""Keys that only CPOConfig has."""

_DPO_RATE = 1e-6
"""Learning rate of DPOConfig, ORPOConfig and CPOConfig without ``learning_rate``."""


LLAMA_FACTORY: Table = placed(
    {
        **mapped(ValueKind.NUMBER, pref_beta=0.1, dpo_label_smoothing=0.0, simpo_gamma=0.5),
        **mapped(ValueKind.NUMBER, pref_ftx=0.0),
        **mapped(ValueKind.TEXT, pref_loss=SIGMOID),
        **switched("stage is not dpo", _TERM, pref_bco_weight=0.0, ld_alpha=None),
        **switched(
            "stage is not dpo",
            _REFERENCE,
            ref_model=None,
            ref_model_adapters=None,
            ref_model_quantization_bit=None,
        ),
        **dropped(
            Effect.NONE,
            _OTHER_STAGE,
            kto_chosen_weight=1.0,
            kto_rejected_weight=1.0,
            ppo_buffer_size=1,
            ppo_epochs=4,
            ppo_score_norm=False,
            ppo_target=6.0,
            ppo_whiten_rewards=False,
            reward_model_type="lora",
        ),
        **without(
            Effect.NONE,
            _OTHER_STAGE,
            "reward_model reward_model_adapters reward_model_quantization_bit",
        ),
    },
    {
        "pref_beta": _SECTIONS,
        "dpo_label_smoothing": "data.dpo",
        "simpo_gamma": "data.simpo",
        "pref_ftx": "data.orpo data.simpo",
        "pref_loss": "data.objective",
    },
    {
        "pref_beta": BETA_NOTE,
        "dpo_label_smoothing": "{label_smoothing: SHARE}",
        "simpo_gamma": "{gamma: NUMBER}",
        "pref_ftx": "{likelihood: NUMBER} of orpo (1 more) and simpo",
        "pref_loss": "dpo is sigmoid",
    },
)
"""Keys of LLaMA-Factory's ``stage: dpo`` with its losses."""

AXOLOTL: Table = placed(
    {
        **mapped(ValueKind.TEXT, rl=None),
        **mapped(ValueKind.NUMBER, rl_beta=None, dpo_label_smoothing=None),
        **mapped(ValueKind.NUMBER, orpo_alpha=None, simpo_gamma=0.5, cpo_alpha=1.0),
        **mapped(ValueKind.MAPPING, trl=None),
        **switched(
            "rl is not set",
            _TERM,
            dpo_use_weighting=None,
            dpo_norm_loss=None,
            rpo_alpha=None,
            dpo_loss_type=None,
        ),
        **without(Effect.NONE, "evaluations generate no text", "dpo_generate_during_eval"),
        **without(Effect.NONE, "the start computes the reference once", "precompute_ref_log_probs"),
        **without(Effect.NONE, _REFERENCE, "rl_adapter_ref_model"),
        **without(Effect.SPEED, "rows of pairs hold one answer", "dpo_padding_free"),
        **without(Effect.SPEED, "other kernels are used", "dpo_use_logits_to_keep"),
        **without(
            Effect.NONE,
            _OTHER_STAGE,
            "kto_desirable_weight kto_undesirable_weight",
        ),
    },
    {"rl": "data.objective", "rl_beta": _SECTIONS, "dpo_label_smoothing": "data.dpo"}
    | {"trl": _SECTIONS, "orpo_alpha": "data.orpo"}
    | {"simpo_gamma": "data.simpo", "cpo_alpha": "data.simpo"},
    {
        "rl": "dpo, orpo or simpo",
        "rl_beta": BETA_NOTE,
        "dpo_label_smoothing": "{label_smoothing: SHARE}",
        "trl": "its beta",
        "orpo_alpha": "{beta: NUMBER}",
        "simpo_gamma": "{gamma: NUMBER}",
        "cpo_alpha": "{likelihood: NUMBER}",
    },
)
"""Keys of Axolotl's ``rl``: dpo, orpo and simpo."""


_LOSSES = {SIGMOID: DPO, ORPO: ORPO, SIMPO: SIMPO}
"""Losses of LLaMA-Factory's ``stage: dpo``, and the objectives."""

_REFERENCE_KEYS = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit")


def trains_on_pairs(reading: KeyReading) -> bool:
    """Returns whether a file of Axolotl trains on pairs.

    Raises:
        ConfigError: the file is for another training, or packs rows of pairs.
    """
    kind = reading.get("rl")
    if not kind:
        return False
    if kind not in PAIR_OBJECTIVES:
        remedy = "only dpo, orpo, simpo and supervised fine-tuning are converted"
        raise reading.refused("rl", kind, remedy)
    if reading.get("sample_packing"):
        remedy = "goes without rl; remove it, as Axolotl asks"
        raise reading.refused("sample_packing", True, remedy)
    return True


def put_axolotl(reading: KeyReading) -> None:
    """Sets the objective of Axolotl's ``rl``, and records another reference.

    Raises:
        ConfigError: the loss is another one, or a value has another type.
    """
    objective = str(reading.get("rl"))
    reading.map("rl", {"data.objective": objective})
    others = dict(reading.get("trl") or {})
    beta, key = others.pop("beta", None), "trl"
    if beta is None:
        beta, key = reading.get("rl_beta"), "rl_beta"
    if beta is None and objective == ORPO:
        beta, key = reading.get("orpo_alpha"), "orpo_alpha"
    number = 0.1 if beta is None else float(reading.typed(key, ValueKind.NUMBER, beta))
    put_loss(reading, objective, number, key)
    for name, value in others.items():
        reading.drop(f"trl.{name}", "only trl.beta has a place", value=value)
    if objective == SIMPO:
        put_term(reading, SIMPO, "gamma", "simpo_gamma")
        put_term(reading, SIMPO, "likelihood", "cpo_alpha")
    if objective == DPO:
        _put_axolotl_dpo(reading)
    elif objective == ORPO or reading.get("cpo_alpha"):
        note_means(reading, "rl")
    put_rows(reading, "micro_batch_size")


def _put_axolotl_dpo(reading: KeyReading) -> None:
    """Sets the smoothing of Axolotl's ``rl: dpo``, and records another reference.

    Raises:
        ConfigError: the loss is another one.
    """
    if reading.get("dpo_label_smoothing"):
        put_term(reading, DPO, "label_smoothing", "dpo_label_smoothing")
    loss = reading.get("dpo_loss_type")
    if loss not in (None, SIGMOID, [SIGMOID]):
        raise reading.refused("dpo_loss_type", loss, ONE_LOSS.format("Axolotl"))
    for name in ("dpo_use_weighting", "dpo_norm_loss", "rpo_alpha"):
        if reading.get(name):
            reading.drop(name, _TERM)
    if reading.config.get("adapter", {}).get("path") and not reading.get("rl_adapter_ref_model"):
        reading.drop(
            "rl_adapter_ref_model",
            "the reference is the model without the adapter of lora_model_dir there, and with the"
            " adapter here; set rl_adapter_ref_model: true",
            value=False,
        )


def names_pairs(reading: KeyReading) -> bool:
    """Returns whether a key of a file of TRL is one of pairs alone."""
    keys = (*_DPO_KEYS, *_SIMPO_KEYS)
    return reading.objective is not None or any(key in reading.values for key in keys)


def _objective(reading: KeyReading) -> str:
    """Returns the objective of a file of pairs.

    Raises:
        ConfigError: the loss is another one, or the file may be one of two trainers.
    """
    loss, named = reading.get("loss_type"), reading.objective
    losses = loss if isinstance(loss, list) else [SIGMOID if loss is None else loss]
    given = [key for key in _SIMPO_KEYS if key in reading.values]
    if losses == [SIMPO] or (named == SIMPO and loss is None):
        if named not in (None, SIMPO):
            raise reading.refused("loss_type", loss, f"--objective is {named}; give simpo")
        if reading.get("alpha"):
            raise reading.refused("alpha", reading.get("alpha"), _NO_ALPHA)
        return SIMPO
    if losses != [SIGMOID] or named == SIMPO:
        raise reading.refused("loss_type", loss, ONE_LOSS.format("TRL"))
    if given:
        remedy = (
            f"is of CPOConfig, and its loss is {SIGMOID} without loss_type; set loss_type:"
            " simpo, or train with TRL"
        )
        raise reading.refused(given[0], reading.values[given[0]], remedy)
    both = [key for key in _UNREFERENCED_KEYS if key in reading.values]
    if named is None and both:
        remedy = "is of ORPOConfig, or of an old DPOConfig; give --objective orpo or dpo"
        raise reading.refused(both[0], reading.values[both[0]], remedy)
    return named or DPO


def put_trl(reading: KeyReading) -> None:
    """Sets the objective of pairs, and counts rows in place of pairs.

    Raises:
        ConfigError: the loss is another one, or the file may be one of two trainers.
    """
    objective = _objective(reading)
    if "loss_type" in reading.values:
        reading.map("loss_type", {"data.objective": objective})
    put_loss(reading, objective, float(reading.get("beta")), "beta")
    smoothing = reading.get("label_smoothing")
    if objective == SIMPO:
        put_term(reading, SIMPO, "gamma", "simpo_gamma")
        put_term(reading, SIMPO, "likelihood", "cpo_alpha")
        if smoothing:
            put_term(reading, SIMPO, "label_smoothing", "label_smoothing")
    elif smoothing:
        reading.drop("label_smoothing", "TRL's loss does not read the key", Effect.NONE)
    if objective == ORPO or (objective == SIMPO and reading.get("cpo_alpha")):
        note_means(reading, "beta")
    elif objective == SIMPO:
        reading.map("beta", {}, MARKS)
    put_rows(reading, "per_device_train_batch_size")
    if "learning_rate" not in reading.values:
        reading.put("optimizer.lr", _DPO_RATE)
        reading.map("learning_rate", {"optimizer.lr": _DPO_RATE}, "the default of the trainer")


def check_llamafactory(reading: KeyReading) -> None:
    """Refuses values that ``stage: dpo`` cannot have.

    Raises:
        ConfigError: the loss is another one, or a key goes with ``stage: sft``.
    """
    loss = reading.get("pref_loss")
    if loss not in _LOSSES:
        raise reading.refused("pref_loss", loss, ONE_LOSS.format("LLaMA-Factory"))
    if loss != SIGMOID and reading.get("dpo_label_smoothing"):
        value = reading.get("dpo_label_smoothing")
        remedy = "goes with pref_loss sigmoid; remove it, as LLaMA-Factory asks"
        raise reading.refused("dpo_label_smoothing", value, remedy)
    for key in ("neat_packing", "train_on_prompt", "mask_history"):
        if reading.get(key):
            raise reading.refused(
                key, True, "goes with stage sft; remove it, as LLaMA-Factory asks"
            )


def put_llamafactory(reading: KeyReading) -> None:
    """Sets the objective of pairs, and records another reference than the start of the run."""
    objective = _LOSSES[reading.get("pref_loss")]
    put_loss(reading, objective, float(reading.get("pref_beta")), "pref_beta")
    reading.map("pref_loss", {"data.objective": objective})
    put_rows(reading, "per_device_train_batch_size")
    drop_used(reading, "ld_alpha")
    if objective == DPO:
        if reading.get("dpo_label_smoothing"):
            put_term(reading, DPO, "label_smoothing", "dpo_label_smoothing")
        drop_used(reading, "pref_bco_weight")
        if reading.get("pref_ftx"):
            reading.drop("pref_ftx", "the loss of dpo has no likelihood term")
        _put_reference(reading)
        return
    for key in (*_REFERENCE_KEYS, "pref_bco_weight"):
        if reading.get(key):
            reading.drop(key, f"pref_loss {objective} does not read the key", Effect.NONE)
    likelihood = float(reading.get("pref_ftx"))
    if objective == SIMPO:
        put_term(reading, SIMPO, "gamma", "simpo_gamma")
    else:
        likelihood += 1.0
    if likelihood:
        terms = {"likelihood": likelihood, "likelihood_mean": "samples"}
        if objective == ORPO:
            terms["likelihood_on"] = "completion"
        reading.config["data"][objective] |= terms
        reading.map("pref_ftx", {f"data.{objective}": terms})


def _put_reference(reading: KeyReading) -> None:
    """Records another reference than the start of the run."""
    start = reading.config.get("adapter", {}).get("path")
    keys = _REFERENCE_KEYS
    given = [reading.get(key) for key in keys]
    if given[0] is None and start is not None:
        why = (
            "the reference is the model without the adapter there, and with the adapter here: set"
            f" ref_model to the model and ref_model_adapters to {start}"
        )
        reading.drop("ref_model", why)
    same = given[0] is None or given == [reading.get("model_name_or_path"), start, None]
    for key in keys:
        if reading.get(key) is not None:
            effect = Effect.NONE if same else Effect.RESULT
            reading.drop(key, reading.table[key].used, effect)


def put_loss(reading: KeyReading, objective: str, beta: float, key: str) -> None:
    """Sets the objective of pairs with its factor, which ``key`` decides."""
    reading.put("data.objective", objective)
    reading.put(f"data.{objective}", {"beta": beta})
    reading.map(key, {f"data.{objective}": {"beta": beta}})


def put_term(reading: KeyReading, objective: str, name: str, key: str) -> None:
    """Sets a number in the section of the objective; ``key`` is that of the trainer."""
    terms = {name: float(reading.get(key))}
    reading.config["data"][objective] |= terms
    reading.map(key, {f"data.{objective}": terms})


def note_means(reading: KeyReading, key: str) -> None:
    """Notes at ``key`` the rows and means of TRL's trainers without a reference."""
    reading.map(key, {}, f"{MARKS}; {MEANS}")


def put_rows(reading: KeyReading, batch: str) -> None:
    """Counts rows in place of pairs in the batch of a step, of which ``batch`` is the key.

    Steps of a pass count pairs, so this comes behind all that counts steps.
    """
    rows = 2 * reading.config["train"]["global_batch"]
    reading.put("train.global_batch", rows, batch, note="a pair of answers is two rows")
