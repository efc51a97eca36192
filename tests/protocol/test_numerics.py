"""The numerics recipe as a value: text, digest, and errors of a strict reader."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.host.errors import StateError
from penstock.protocol.run.numerics import (
    Arithmetic,
    Attention,
    Batch,
    CompilerChoice,
    Kernels,
    Layer,
    Numerics,
    Sums,
)

ARITHMETIC = Arithmetic(
    compute_dtype="bfloat16",
    deterministic=True,
    float32_precision="highest",
    tf32_products=False,
    tf32_convolutions=True,
    reduced_sums_bf16=True,
    reduced_sums_fp16=True,
    cublas_workspace=":4096:8",
    instructions="AVX512",
)
ATTENTION = Attention(forward="flash_attention", backward="flash_attention_backward", evaluation="")
COMPILER = CompilerChoice(backend="inductor", deterministic=True, options={"fallback_random": "1"})
KERNELS = Kernels(
    asked="auto",
    choice="sdpa",
    attention={"LlamaBlock": ATTENTION},
    arithmetic=ARITHMETIC,
    compiler=COMPILER,
)
RECIPE = Numerics(
    plan="feed",
    batch=Batch(
        micro_batch=4, sequence_length=16, objective="next-token", attention_mask="documents"
    ),
    layers=(
        Layer(
            kind="LlamaBlock",
            compiled_in_training=True,
            compiled_in_evaluation=False,
            attention=ATTENTION,
        ),
    ),
    compiler=COMPILER,
    sums=Sums(
        micro_batches="fp32, one mixed kernel", stored="bf16", replicas="none", loss_rows=1024
    ),
    arithmetic=ARITHMETIC,
    threads=2,
    software={"torch": "2.13.0", "processor": "x"},
)


def test_a_recipe_comes_back_from_its_text() -> None:
    for recipe in (RECIPE, replace(RECIPE, compiler=None, arithmetic=None, layers=())):
        assert Numerics.from_json(recipe.to_json(), "here") == recipe
        assert Numerics.from_json(recipe.canonical, "here").digest == recipe.digest
    assert Kernels.from_json(KERNELS.to_json(), "here") == KERNELS


def test_the_digest_follows_every_field_and_no_order_of_keys() -> None:
    assert len(RECIPE.digest) == 16
    turned = replace(RECIPE, software=dict(reversed(RECIPE.software.items())))
    assert turned.digest == RECIPE.digest
    others = [
        replace(RECIPE, plan="dead"),
        replace(RECIPE, batch=replace(RECIPE.batch, micro_batch=2)),
        replace(RECIPE, layers=(replace(RECIPE.layers[0], compiled_in_evaluation=True),)),
        replace(RECIPE, compiler=replace(COMPILER, deterministic=False)),
        replace(RECIPE, sums=replace(RECIPE.sums, stored="fp32")),
        replace(RECIPE, arithmetic=replace(ARITHMETIC, tf32_products=True)),
        replace(RECIPE, threads=1),
        replace(RECIPE, software={"torch": "2.14.0", "processor": "x"}),
    ]
    assert len({recipe.digest for recipe in (RECIPE, *others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("thread",), 1, "unknown field thread"),
        (("batch", "mask"), "x", "unknown field batch.mask"),
        (("batch", "micro_batch"), None, "missing field batch.micro_batch"),
        (("batch", "micro_batch"), True, "batch.micro_batch is True, not of type int"),
        (("batch",), [], r"batch is \[\], not an object"),
        (("layers", 0, "kind"), 3, r"layers\[0\].kind is 3, not of type str"),
        (("layers",), {}, "layers is {}, not of type list"),
        (("software", "torch"), 2.13, "software.torch is 2.13, not of type str"),
        (("format",), 2, "format is not 1"),
    ],
)
def test_a_strange_field_is_named_with_file_and_remedy(
    place: tuple[Any, ...], value: Any, complaint: str
) -> None:
    """``value`` None takes the field away."""
    fields: Any = json.loads(RECIPE.to_json())
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    with pytest.raises(StateError, match=f"^/run/numerics.json: {complaint}; .*penstock train"):
        Numerics.from_json(json.dumps(fields), "/run/numerics.json")
    with pytest.raises(StateError, match=r"numerics\.json: .*penstock train"):
        Numerics.from_json("[" * 9999, "/run/numerics.json")
