"""Pairs of answers of other trainers: ``data.objective: dpo`` and ``data.dpo``."""

from __future__ import annotations

from typing import Any

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

SIGMOID = "sigmoid"
"""The one loss of pairs."""

ONE_LOSS = "data.objective dpo has the loss sigmoid alone; use it, or train with {}"
_REFERENCE = "the reference is the model at the start of the run"
_TERM = "the loss of pairs is the sigmoid of DPO alone"
_BETA_NOTE = "{beta: NUMBER}, with data.objective dpo"
_OTHER_STAGE = "another stage or loss reads the key"

LLAMA_FACTORY: Table = placed(
    {
        **mapped(ValueKind.NUMBER, pref_beta=0.1, dpo_label_smoothing=0.0),
        **mapped(ValueKind.TEXT, pref_loss=SIGMOID),
        **switched("stage is not dpo", _TERM, pref_ftx=0.0, pref_bco_weight=0.0, ld_alpha=None),
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
            simpo_gamma=0.5,
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
        "pref_beta": "data.dpo",
        "dpo_label_smoothing": "data.dpo",
        "pref_loss": "data.objective",
    },
    {
        "pref_beta": _BETA_NOTE,
        "dpo_label_smoothing": "{label_smoothing: SHARE}",
        "pref_loss": "dpo is sigmoid",
    },
)
"""Keys of LLaMA-Factory's ``stage: dpo``."""

AXOLOTL: Table = placed(
    {
        **mapped(ValueKind.TEXT, rl=None),
        **mapped(ValueKind.NUMBER, rl_beta=None, dpo_label_smoothing=None),
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
            "orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight",
        ),
    },
    {"rl": "data.objective", "rl_beta": "data.dpo", "dpo_label_smoothing": "data.dpo"}
    | {"trl": "data.dpo"},
    {
        "rl": "dpo",
        "rl_beta": _BETA_NOTE,
        "dpo_label_smoothing": "{label_smoothing: SHARE}",
        "trl": "its beta",
    },
)
"""Keys of Axolotl's ``rl: dpo``."""


def trains_on_pairs(reading: KeyReading) -> bool:
    """Returns whether a file of Axolotl trains on pairs.

    Raises:
        ConfigError: the file is for another training, or packs rows of pairs.
    """
    kind = reading.get("rl")
    if not kind:
        return False
    if kind != "dpo":
        remedy = "only dpo and supervised fine-tuning are converted"
        raise reading.refused("rl", kind, remedy)
    if reading.get("sample_packing"):
        remedy = "goes without rl; remove it, as Axolotl asks"
        raise reading.refused("sample_packing", True, remedy)
    return True


def put_axolotl(reading: KeyReading) -> None:
    """Sets the objective of Axolotl's ``rl: dpo``, and records another reference.

    Raises:
        ConfigError: the loss is another one, or a value has another type.
    """
    reading.map("rl", {"data.objective": "dpo"})
    others = dict(reading.get("trl") or {})
    beta, key = others.pop("beta", None), "trl"
    if beta is None:
        beta, key = reading.get("rl_beta"), "rl_beta"
    number = 0.1 if beta is None else float(reading.typed(key, ValueKind.NUMBER, beta))
    smoothing = "dpo_label_smoothing"
    put_loss(reading, number, key, smoothing=reading.get(smoothing), smoothing_key=smoothing)
    for name, value in others.items():
        reading.drop(f"trl.{name}", "only trl.beta has a place", value=value)
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
    put_rows(reading, "micro_batch_size")


def put_loss(
    reading: KeyReading, beta: float, key: str, *, smoothing: Any = None, smoothing_key: str = ""
) -> None:
    """Sets the objective of pairs with its factor, which ``key`` decides."""
    reading.put("data.objective", "dpo")
    reading.put("data.dpo", {"beta": beta})
    reading.map(key, {"data.dpo": {"beta": beta}})
    if smoothing:
        reading.config["data"]["dpo"]["label_smoothing"] = float(smoothing)
        reading.map(smoothing_key, {"data.dpo": {"label_smoothing": float(smoothing)}})


def put_rows(reading: KeyReading, batch: str) -> None:
    """Counts rows in place of pairs in the batch of a step, of which ``batch`` is the key.

    Steps of a pass count pairs, so this comes behind all that counts steps.
    """
    rows = 2 * reading.config["train"]["global_batch"]
    reading.put("train.global_batch", rows, batch, note="a pair of answers is two rows")
