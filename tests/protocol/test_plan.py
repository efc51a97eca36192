"""Plan as data: JSON both ways, shape checks, lookups."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.errors import ConfigError, ProtocolError
from penstock.protocol.plan.instructions import Forward, Keep, parse_program
from penstock.protocol.plan.layout import StageLayout
from penstock.protocol.plan.plan import Plan, StageRange

PLAN = Plan(
    scheme="spipe",
    num_devices=2,
    num_microbatches=1,
    forward_stages=(
        StageRange(start=0, stop=2, device=0),
        StageRange(start=2, stop=5, device=1),
    ),
    backward_stages=(
        StageRange(start=0, stop=1, device=1),
        StageRange(start=1, stop=2, device=0),
        StageRange(start=2, stop=4, device=1),
        StageRange(start=4, stop=5, device=0),
    ),
    programs=parse_program("device 0: F 0 0 keep=input; SA 0 0 peer=1\ndevice 1: RA 0 0 peer=0"),
    evaluation=((Forward(stage=0, micro_batch=0, keep=Keep.NONE),), ()),
)


def test_json_round_trip_keeps_plan_and_digest() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.digest == PLAN.digest
    assert Plan.from_json(PLAN.to_json().encode()) == PLAN


@pytest.mark.parametrize("flag", ["rebinds_weights", "shards_weights", "concatenates_gradients"])
def test_flags_are_written_where_they_are_set(flag: str) -> None:
    plan = dataclasses.replace(PLAN, **{flag: True})
    assert json.loads(plan.to_json())[flag] is True
    assert flag not in json.loads(PLAN.to_json())
    assert Plan.from_json(plan.to_json()) == plan


def test_blocks_settled_early_travel_and_files_without_them_have_none() -> None:
    plan = dataclasses.replace(PLAN, settled_early=(1, 4))
    assert Plan.from_json(plan.to_json()) == plan
    assert "settled_early" not in json.loads(PLAN.to_json())
    assert plan.digest != PLAN.digest


def test_digest_depends_on_programs() -> None:
    assert dataclasses.replace(PLAN, evaluation=((), ())).digest != PLAN.digest


def test_lookups() -> None:
    assert PLAN.num_blocks == 5
    assert [PLAN.forward_stage_of(b) for b in range(5)] == [0, 0, 1, 1, 1]
    assert [PLAN.backward_stage_of(b) for b in range(5)] == [0, 1, 2, 2, 3]
    layout = StageLayout.of(PLAN)
    assert [layout.checkpoints_of(s) for s in range(2)] == [(0, 1), (2, 3)]
    with pytest.raises(IndexError, match="block 5"):
        PLAN.backward_stage_of(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_stages": [[0, 2, 0], [3, 5, 1]]}, r"forward stage 1 covers blocks \[3, 5\)"),
        ({"forward_stages": [[0, 2, 0], [2, 2, 1]]}, r"forward stage 1 covers blocks \[2, 2\)"),
        ({"backward_stages": [[0, 4, 0]]}, "forward stages end at block 5, backward stages at 4"),
        ({"backward_stages": [[0, 5, 2]]}, "backward stage 0 is on device 2; there are 2 devices"),
        ({"forward_stages": []}, "forward stages: there are none"),
        ({"num_devices": 0}, "number of devices is 0"),
        ({"num_microbatches": 0}, "number of micro-batches is 0"),
        ({"programs": [[]]}, "programs has 1 programs for 2 devices"),
        ({"settled_early": [4, 2]}, r"settled_early\[1\] is 2; expected ascending numbers of bl"),
        ({"settled_early": [5]}, r"settled_early\[0\] is 5; expected .*, there are 5"),
        ({"settled_early": [2], "programs": [[], ["U 2"]]}, "2, a block that device 1 updates"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), **changes}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "format is None"),
        (b"\xff\xfe{", "not valid JSON"),
    ],
)
def test_text_that_is_no_plan(text: str | bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": 3}, "scheme is 3, expected a string"),
        ({"num_devices": True}, "num_devices is True"),
        ({"num_devices": -1}, "num_devices is -1"),
        ({"num_microbatches": 1e400}, "num_microbatches is inf"),
        ({"forward_stages": [[0, 1]]}, r"forward_stages\[0\] is \[0, 1\]"),
        ({"forward_stages": {"a": 1}}, "forward_stages is {'a': 1}, expected a list"),
        ({"programs": [["F 0 0 keep=al"], []]}, r"programs\[0\]\[0\]: token 'keep=al'"),
        ({"settled_early": ["a"]}, "settled_early is 'a', expected a number"),
        ({"programs": [[7], []]}, r"programs\[0\]\[0\] is 7, expected a string"),
    ],
)
def test_wrong_types_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), **changes}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.binary() | st.text())
def test_arbitrary_bytes_never_crash(data: str | bytes) -> None:
    with pytest.raises((ProtocolError, ConfigError)):
        Plan.from_json(data)


@given(st.sampled_from(sorted(json.loads(PLAN.to_json()))), JSON)
def test_arbitrary_values_in_any_field_never_crash(key: str, value: Any) -> None:
    data = {**json.loads(PLAN.to_json()), key: value}
    try:
        plan = Plan.from_json(json.dumps(data))
    except (ProtocolError, ConfigError):
        return
    plan.validate_shape()
