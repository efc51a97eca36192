"""Data-plane headers: round trips, and whatever bytes arrive, only ProtocolError comes out."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.host.errors import ProtocolError
from penstock.protocol.wire.frames import (
    MAX_HEADER_BYTES,
    BlockReply,
    BlockRequest,
    BlockUpdated,
    GradientReady,
    GroupAddress,
    Header,
    LeaseReply,
    LeaseRequest,
    TensorHeader,
    Transfer,
    TransferShape,
    decode,
    encode,
)

KINDS = (
    Transfer,
    GroupAddress,
    TransferShape,
    GradientReady,
    BlockUpdated,
    LeaseRequest,
    LeaseReply,
    BlockRequest,
    BlockReply,
)

UNTIMED = settings(deadline=None)
"""Other processes may use the cores: a slow example is no failure."""

texts = st.text(max_size=20)
counts = st.integers(0, 2**64 - 1)
tensors = st.builds(
    TensorHeader, name=texts, dtype=texts, shape=st.lists(counts, max_size=4).map(tuple)
)
headers: st.SearchStrategy[Header] = st.one_of(
    st.builds(
        Transfer,
        run_id=texts,
        epoch=counts,
        phase=st.sampled_from(["train", "eval"]),
        attempt=counts,
        kind=st.sampled_from(["activation", "gradient", "checkpoint"]),
        stage=counts,
        micro_batch=counts,
        tensors=st.lists(tensors, max_size=3).map(tuple),
    ),
    st.builds(GroupAddress, run_id=texts, epoch=counts, port=counts),
    st.builds(
        TransferShape,
        run_id=texts,
        epoch=counts,
        sender=counts,
        phase=st.sampled_from(["train", "eval"]),
        kind=st.sampled_from(["activation", "gradient", "checkpoint"]),
        stage=counts,
        tensors=st.lists(tensors, max_size=3).map(tuple),
    ),
    st.builds(
        GradientReady, run_id=texts, epoch=counts, attempt=counts, block=counts, contribution=counts
    ),
    st.builds(
        BlockUpdated,
        run_id=texts,
        epoch=counts,
        attempt=counts,
        block=counts,
        version=counts,
        finite=st.booleans(),
        sum_squares=st.floats(allow_nan=False),
        seconds=st.floats(allow_nan=False),
    ),
    st.builds(LeaseRequest, run_id=texts, member=texts, pid=counts),
    st.builds(
        LeaseReply,
        segments=st.lists(st.tuples(texts, counts), max_size=3).map(tuple),
        digest=st.binary(max_size=40),
        undo_bytes=counts,
        error=texts,
    ),
    st.builds(
        BlockRequest,
        run_id=texts,
        epoch=counts,
        attempt=counts,
        array=st.sampled_from(["weights", "frozen", "grads"]),
        block=counts,
        version=counts,
        contribution=counts,
        offset=counts,
        num_bytes=counts,
    ),
    st.builds(
        BlockReply,
        status=st.sampled_from(["ok", "wait", "error"]),
        block=counts,
        version=counts,
        offset=counts,
        num_bytes=counts,
        array_bytes=counts,
        error=texts,
    ),
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | counts
    | st.integers(-(2**63), -1)
    | st.floats()
    | texts
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.binary(), inner),
    max_leaves=8,
)


@UNTIMED
@given(headers)
def test_round_trip(header: Header) -> None:
    assert decode(encode(header), type(header)) == header
    assert decode(memoryview(encode(header)), *KINDS) == header


@UNTIMED
@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_arbitrary_bytes(data: bytes, kind: type[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(data, kind)


@UNTIMED
@given(headers, st.data())
def test_mutated_bytes(header: Header, data: st.DataObject) -> None:
    wire = bytearray(encode(header))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(wire) - 1))
        wire[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(wire)))
    for mutated in (bytes(wire), bytes(wire[:cut]), bytes(wire) + b"\xc0"):
        try:
            found = decode(mutated, *KINDS)
        except ProtocolError:
            continue
        assert type(found) in KINDS


@UNTIMED
@given(headers, st.data())
def test_mutated_fields(header: Header, data: st.DataObject) -> None:
    fields = dataclasses.asdict(header)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(anything)
    wire = msgpack.packb([type(header).__name__, fields])
    try:
        found = decode(wire, type(header))
    except ProtocolError:
        return
    assert decode(encode(found), type(header)) == found or found != found


@UNTIMED
@given(anything)
def test_other_msgpack(value: Any) -> None:
    for body in (value, ["BlockRequest", value], [value, {}]):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(body), *KINDS)


def test_deep_nesting() -> None:
    for depth in (500, 1000, 10_000):
        for wire in (b"\x91" * depth, b"\x92\xacLeaseRequest\x83\xa6run_id" + b"\x91" * depth):
            with pytest.raises(ProtocolError):
                decode(wire + b"\xc0\xa6member\xa1a\xa3pid\x01", LeaseRequest)


def test_too_large() -> None:
    request = LeaseRequest(run_id="r", member="m" * MAX_HEADER_BYTES, pid=1)
    with pytest.raises(ProtocolError, match=r"LeaseRequest: header of .* bytes, limit 65536"):
        encode(request)
    with pytest.raises(ProtocolError, match="header of 65537 bytes"):
        decode(bytes(MAX_HEADER_BYTES + 1), LeaseRequest)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pid": -1}, "LeaseRequest.pid: -1 is not a valid value"),
        ({"pid": True}, "LeaseRequest.pid: True is not a valid value"),
        ({"pid": [1]}, "LeaseRequest.pid: a list is not a valid value"),
        ({"member": b"x"}, "LeaseRequest.member: b'x' is not a valid value"),
        ({"colour": 1}, "LeaseRequest: missing or unknown fields: 'colour'"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], message: str) -> None:
    good = {"run_id": "r", "member": "m", "pid": 1}
    with pytest.raises(ProtocolError, match=message):
        decode(msgpack.packb(["LeaseRequest", good | fields]), LeaseRequest)


def test_another_message_is_named() -> None:
    wire = encode(LeaseRequest(run_id="r", member="m", pid=1))
    with pytest.raises(ProtocolError, match="expected BlockRequest, got 'LeaseRequest'"):
        decode(wire, BlockRequest)
    with pytest.raises(ProtocolError, match="expected LeaseRequest, got 'TensorHeader'"):
        decode(msgpack.packb(["TensorHeader", {}]), LeaseRequest)
