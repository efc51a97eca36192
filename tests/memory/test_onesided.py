"""When bytes count that were read without asking: every step of a read, over real control words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.daemons.fetch.reads import SCRATCH_BYTES, Places, Read, StaleError, Step, Target
from penstock.daemons.fetch.serving import identity_of
from penstock.host.errors import ProtocolError
from penstock.protocol.wire.frames import AgentOffer, BlockRequest, ReadReply
from penstock.shm.control import INVALID_VERSION, ControlView
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.words import CopiedWords, block_words

GENERATION = 77
IDENTITY, SCRATCH, STAGING = 10**15, 2 * 10**15, 3 * 10**15
STARTS = {kind: 10**12 * number for number, kind in enumerate(SegmentKind, start=1)}
"""Addresses that nothing has: the test moves the bytes."""


class Peer:
    """A node's memory, and the transfers that a fetchd elsewhere would have made."""

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self.identity = identity_of(GENERATION)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        sizes = {**memory.spec.layout.sizes, SegmentKind.CONTROL: 2**20}
        self.offer = AgentOffer(
            run_id=memory.spec.run_id,
            node="a",
            pid=1,
            generation=GENERATION,
            metadata=b"",
            identity=IDENTITY,
            segments=tuple((kind.value, STARTS[kind], size) for kind, size in sizes.items()),
            digest=memory.spec.digest,
        )

    def read(self, request: BlockRequest) -> Read:
        target = Target(scratch=self.scratch, scratch_address=SCRATCH, staging_address=STAGING)
        return Read(1, request, Places(self.offer, self.memory.spec), target)

    def transfer(self, read: Read) -> ReadReply | None:
        """Move what is asked for; the answer, if that was the last transfer."""
        control = self.memory.segment_buffer(SegmentKind.CONTROL)
        assert control is not None
        for here, there, size in read.pieces():
            if there == IDENTITY:
                data: bytes | memoryview = self.identity
            elif read.step is Step.DATA:
                continue
            else:
                start = there - STARTS[SegmentKind.CONTROL]
                data = control[start : start + size]
            self.scratch[here - SCRATCH : here - SCRATCH + size] = data
        return read.arrived()

    def outcome(
        self, request: BlockRequest, between: Callable[[ControlView], None] = lambda c: None
    ) -> str:
        """How a read ends during whose data transfer ``between`` happens."""
        read = self.read(request)
        reply = self.transfer(read)
        if reply is None:
            between(self.memory.control)
            assert self.transfer(read) is None
            reply = self.transfer(read)
        assert reply is not None
        return reply.status


def request(**changes: Any) -> BlockRequest:
    fields: dict[str, Any] = {
        "run_id": "r",
        "epoch": 2,
        "attempt": 9,
        "array": "weights",
        "block": 1,
        "version": 4,
        "contribution": 0,
        "offset": 0,
        "num_bytes": 32,
    }
    return BlockRequest(**(fields | changes))


GRADS = request(array="grads", version=5)


@pytest.fixture
def peer(memory: NodeMemory, helpers: Any) -> Peer:
    helpers.commit(memory, 4)
    memory.control.set_epoch(2)
    for kind in ("begin_frozen", "end_frozen"):
        getattr(memory.control, kind)(1)
    memory.control.begin_gradients(1, 1, 0)
    memory.control.end_gradients(1, 1, 0)
    memory.control.set_ready(1, 0, epoch=2, attempt=9)
    return Peer(memory)


def test_copied_words_are_those_of_the_view(memory: NodeMemory) -> None:
    control = memory.control
    control.set_incarnation(3)
    control.set_epoch(4)
    control.set_committed(5)
    control.set_generation(1)
    control.set_lost_attempt(6)
    control.set_slot_version(2, 1, 7)
    control.set_ready(2, 11, epoch=8, attempt=9)
    control.begin_frozen(2)
    control.begin_gradients(2, 1, 11)
    buffer = memory.segment_buffer(SegmentKind.CONTROL)
    assert buffer is not None
    words = block_words(memory.spec.undo_bytes, 2)
    found = CopiedWords.unpack(bytes(buffer[80:152]), bytes(buffer[words.start : words.stop]))
    assert (found.incarnation, found.epoch, found.committed) == (3, 4, 5)
    assert found.lost_attempt == 6
    assert found.slot_versions == (INVALID_VERSION, 7)
    assert found.ready[11] == (8, 9)
    assert found.slot_sequences == (1, control.slot_sequence(2, 1)) == (1, 2)
    assert found.frozen_sequence == 1
    assert [copy[11] for copy in found.gradient_sequences] == [0, 1]


def test_what_is_complete_and_left_alone_counts(peer: Peer) -> None:
    assert peer.outcome(request()) == "ok"
    assert peer.outcome(request(array="frozen")) == "ok"
    assert peer.outcome(GRADS) == "ok"
    # Of an earlier epoch, asked for by an optimizerd that was started again.
    assert peer.outcome(request(array="grads", version=5, epoch=0)) == "ok"


@pytest.mark.parametrize(
    ("wanted", "spoil"),
    [
        (request(version=6), lambda c: None),
        (request(epoch=3), lambda c: None),  # memory that was left over from an epoch before
        (request(), lambda c: c.set_incarnation(0)),
        (request(), lambda c: c.set_committed(3)),  # a preview that may still be amended
        (request(), lambda c: c.set_slot_version(1, 0, INVALID_VERSION)),
        (request(array="frozen"), lambda c: c.begin_frozen(1)),
        (request(array="grads", version=5, attempt=10), lambda c: None),
        (GRADS, lambda c: c.begin_gradients(1, 1, 0)),
        (GRADS, lambda c: c.set_lost_attempt(9)),  # they went with memory that a partner filled
    ],
)
def test_what_is_not_complete_is_not_read(
    peer: Peer, wanted: BlockRequest, spoil: Callable[[ControlView], None]
) -> None:
    spoil(peer.memory.control)
    assert peer.outcome(wanted) == "wait"


def rewrite(control: ControlView) -> None:
    """Other bytes under the same version, as after a skip: its words are the same again."""
    control.set_slot_version(1, 0, INVALID_VERSION)
    control.set_slot_version(1, 0, 4)


def rewrite_gradients(control: ControlView) -> None:
    control.begin_gradients(1, 1, 0)
    control.end_gradients(1, 1, 0)


@pytest.mark.parametrize(
    ("wanted", "write"),
    [
        (request(), rewrite),
        (request(), lambda c: c.set_slot_version(1, 0, INVALID_VERSION)),
        (request(), lambda c: c.set_incarnation(2)),
        (request(), lambda c: c.set_incarnation(0)),
        (request(), lambda c: c.set_committed(3)),
        (request(array="frozen"), lambda c: (c.begin_frozen(1), c.end_frozen(1))),
        (GRADS, rewrite_gradients),
        (GRADS, lambda c: c.begin_gradients(1, 1, 0)),
    ],
)
def test_whoever_writes_during_a_read_is_noticed(
    peer: Peer, wanted: BlockRequest, write: Callable[[ControlView], Any]
) -> None:
    assert peer.outcome(wanted, write) == "torn"


def test_what_happens_to_other_arrays_does_not_matter(peer: Peer) -> None:
    def elsewhere(control: ControlView) -> None:
        control.set_slot_version(1, 1, 5)
        control.set_slot_version(2, 0, INVALID_VERSION)
        control.begin_gradients(1, 0, 0)
        control.begin_gradients(1, 1, 1)
        control.set_committed(5)

    assert peer.outcome(request(), elsewhere) == "ok"
    assert peer.outcome(GRADS, elsewhere) == "ok"


def test_a_fetchd_that_was_started_again_is_noticed_before_and_during_a_read(peer: Peer) -> None:
    read = peer.read(request())
    peer.identity = identity_of(GENERATION + 1)
    with pytest.raises(StaleError):
        peer.transfer(read)
    peer.identity = identity_of(GENERATION)
    read = peer.read(request())
    assert peer.transfer(read) is None
    assert peer.transfer(read) is None
    peer.identity = bytes(16)
    with pytest.raises(StaleError):
        peer.transfer(read)


def test_nothing_beside_an_array_is_read(peer: Peer) -> None:
    size = peer.memory.weights(1, 0).nbytes
    for changes in (
        {"offset": size},
        {"offset": size - 16},
        {"num_bytes": 0},
        {"block": 99},
        {"array": "grads", "contribution": 5},
        {"array": "state", "name": "master"},
    ):
        with pytest.raises(ProtocolError, match="has no bytes"):
            peer.read(request(**changes))
    other = {"digest": b"x", "segments": ()}
    for name, value in other.items():
        fields = {field: getattr(peer.offer, field) for field in peer.offer.__slots__}
        with pytest.raises(ProtocolError, match=r"another plan|too little"):
            Places(AgentOffer(**(fields | {name: value})), peer.memory.spec)
