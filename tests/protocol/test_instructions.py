"""Text form of instructions: every opcode round-trips, errors name line and token."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.errors import ProtocolError
from penstock.protocol.plan.instructions import (
    INSTRUCTIONS,
    MAX_INDEX,
    BackwardWeight,
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    Opcode,
    Phase,
    Recompute,
    RecomputeAfter,
    SendActivation,
    SwapOut,
    format_instruction,
    format_program,
    parse_instruction,
    parse_program,
)

INDEX = st.integers(min_value=0, max_value=MAX_INDEX)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "stage": INDEX,
    "micro_batch": INDEX,
    "micro_batches": st.lists(INDEX, min_size=1, max_size=4).map(tuple),
    "block": INDEX,
    "peer": INDEX,
    "fraction": st.floats(min_value=1e-6, max_value=1.0),
    "keep": st.sampled_from(Keep),
    "drop": st.lists(st.sampled_from(["norm", "silu", "mul_2"]), max_size=3).map(tuple),
    "phase": st.sampled_from(Phase),
    "after": st.sampled_from(RecomputeAfter),
    "resident": st.booleans(),
    "flush": st.booleans(),
}


def field_names(cls: type[Instruction]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def instructions() -> st.SearchStrategy[Instruction]:
    return st.one_of(
        st.builds(cls, **{name: FIELDS[name] for name in field_names(cls)}) for cls in INSTRUCTIONS
    )


def test_one_class_per_opcode() -> None:
    assert [cls.opcode for cls in INSTRUCTIONS] == list(Opcode)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Forward(stage=3, micro_batch=0, keep=Keep.ALL), "F 3 0 keep=all"),
        (SendActivation(stage=3, micro_batch=1, peer=2), "SA 3 1 peer=2"),
        (FetchWeights(stage=1, phase=Phase.BACKWARD), "FW 1 phase=backward"),
        (BackwardWeight(stage=1, micro_batches=(0, 1)), "BW 1 0,1"),
        (Recompute(stage=1, micro_batch=0), "R 1 0"),
        (Recompute(stage=1, micro_batch=0, after=RecomputeAfter.GRADIENT), "R 1 0 after=gradient"),
        (SwapOut(stage=1, micro_batch=0, fraction=0.25), "SO 1 0 fraction=0.25"),
        (SwapOut(stage=1, micro_batch=0, fraction=1.0, peer=3), "SO 1 0 fraction=1.0 peer=3"),
        (
            Forward(stage=3, micro_batch=0, keep=Keep.SELECTIVE, drop=("norm", "silu")),
            "F 3 0 keep=selective drop=norm,silu",
        ),
    ],
)
def test_text_form(instruction: Instruction, text: str) -> None:
    assert str(instruction) == text
    assert parse_instruction(text) == instruction


@given(instructions())
def test_every_instruction_parses_back(instruction: Instruction) -> None:
    assert parse_instruction(format_instruction(instruction)) == instruction


@given(st.lists(st.lists(instructions(), max_size=5).map(tuple), max_size=4).map(tuple))
def test_programs_parse_back(programs: tuple[tuple[Instruction, ...], ...]) -> None:
    assert parse_program(format_program(programs)) == programs


def test_people_may_use_comments_and_semicolons() -> None:
    text = "device 0: F 0 0 keep=input; SA 0 0 peer=1  # the first stage\n\ndevice 1:\n"
    assert parse_program(text) == (
        (
            Forward(stage=0, micro_batch=0, keep=Keep.INPUT),
            SendActivation(stage=0, micro_batch=0, peer=1),
        ),
        (),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device 0:\n X 1 2", "line 2: unknown instruction 'X'"),
        ("device 0:\n F 0 zero keep=all", "line 2: token 'zero': micro_batch: expected a number"),
        ("device 0:\n F 0 0 keep=some", "line 2: token 'keep=some': keep: expected all, selective"),
        ("device 0:\n F 0 0 all", "line 2: token 'all': expected keep=…"),
        ("device 0:\n F 0", "line 2: 'F 0': expected F stage micro_batch keep=…"),
        ("device 0:\n F 0 -1 keep=all", "line 2: token '-1': micro_batch"),
        ("device 0:\n F 0 \u0661 keep=all", "line 2: token '\u0661': micro_batch"),
        ("device 0:\n SO 0 0 fraction=1e9", "line 2: token 'fraction=1e9': fraction"),
        ("device 0:\n SO 0 0 fraction=--", "line 2: token 'fraction=--': fraction"),
        ("F 0 0 keep=all", "line 1: token 'F 0 0 keep=all': expected a line 'device 0:' first"),
        ("device 1:", "line 1: token '1': expected device 0"),
        ("device 0:\ndevice 0:", "line 2: token '0': expected device 1"),
    ],
)
def test_errors_name_line_and_token(text: str, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_program(text)
    assert message in str(caught.value)


@given(st.text() | st.text(alphabet="device 0123:;#\nFRBSAkep=l,."))
def test_arbitrary_text_parses_or_is_refused(text: str) -> None:
    try:
        programs = parse_program(text)
    except ProtocolError:
        return
    assert parse_program(format_program(programs)) == programs
