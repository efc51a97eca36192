"""One read of a range, from its first transfer to its verdict: which bytes to read next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.daemons.fetch.agent import Piece
from penstock.daemons.fetch.serving import IDENTITY_BYTES, identity_of
from penstock.host.errors import ProtocolError
from penstock.protocol.wire.frames import AgentOffer, BlockRequest, ReadReply
from penstock.protocol.wire.onesided import Verdict, is_complete, judge, sequence
from penstock.shm.control import BLOCK_BYTES
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec
from penstock.shm.words import HEADER_WORDS, CopiedWords, block_words

_HEADER_AT, _BLOCK_AT = 16, 128
WORDS_BYTES = 512
"""A copy of the words needs so much: identity, header words, block words."""
SCRATCH_BYTES = 2 * WORDS_BYTES
"""Bytes for the words before and after a read."""


class StaleError(Exception):
    """The answering process is not the fetchd of the offer."""


class Step(Enum):
    """The transfer that is under way."""

    BEFORE = "before"
    DATA = "data"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Registered memory of this process: for the words (mapped, too), and for the bytes."""

    scratch: memoryview
    scratch_address: int
    staging_address: int


class Places:
    """Addresses of a peer's arrays, from its offer and the layout that all nodes compute alike."""

    def __init__(self, offer: AgentOffer, spec: MemorySpec) -> None:
        """Checks that the offered memory is the one that this node expects.

        Raises:
            ProtocolError: it is not, or segments are missing or short.
        """
        if offer.digest != spec.digest:
            raise ProtocolError(f"memory of node {spec.node_name} was made for another plan")
        sizes = {kind: size for kind, _, size in offer.segments}
        for kind, needed in {**spec.layout.sizes, SegmentKind.CONTROL: 1}.items():
            if needed and kind is not SegmentKind.STATE and sizes.get(kind.value, 0) < needed:
                raise ProtocolError(f"node {spec.node_name} offers too little of {kind.value}")
        self.identity = identity_of(offer.generation)
        self._identity_address = offer.identity
        self._starts = {kind: start for kind, start, _ in offer.segments}
        self._spec = spec

    def words(self, block: int, target_address: int) -> list[Piece]:
        """Returns what a copy of the words is read with."""
        control = self._starts[SegmentKind.CONTROL.value]
        words = block_words(self._spec.undo_bytes, block)
        return [
            (target_address, self._identity_address, IDENTITY_BYTES),
            (target_address + _HEADER_AT, control + HEADER_WORDS.start, len(HEADER_WORDS)),
            (target_address + _BLOCK_AT, control + words.start, len(words)),
        ]

    def data(self, request: BlockRequest) -> int:
        """Returns the address of a range.

        Raises:
            ProtocolError: the node has no such array, or the range is not within it.
        """
        # State has no sequence words, so its readers ask memoryd.
        known = request.array in ("weights", "frozen", "grads")
        place = self._spec.layout.arrays.get(request.key) if known else None
        end = request.offset + request.num_bytes
        if place is None or not request.num_bytes or end > place.num_bytes:
            raise ProtocolError(
                f"node {self._spec.node_name} has no bytes [{request.offset}, {end}) of"
                f" {request.array} {request.key}"
            )
        return self._starts[place.segment.value] + place.offset + request.offset


class Read:
    """Steps through the three transfers; the caller begins them and says when each is complete."""

    def __init__(self, serial: int, request: BlockRequest, places: Places, target: Target) -> None:
        """Prepares a read without starting it.

        Raises:
            ProtocolError: what is asked for is not there.
        """
        self.serial = serial
        self.step = Step.BEFORE
        self._request = request
        self._places = places
        self._target = target
        self._data = places.data(request)

    def pieces(self) -> list[Piece]:
        """Returns what to read now."""
        if self.step is Step.DATA:
            return [(self._target.staging_address, self._data, self._request.num_bytes)]
        offset = WORDS_BYTES if self.step is Step.AFTER else 0
        return self._places.words(self._request.block, self._target.scratch_address + offset)

    def arrived(self) -> ReadReply | None:
        """Handles a complete transfer; returns the answer, or None if another transfer follows.

        Raises:
            StaleError: the words come from somewhere else.
        """
        if self.step is Step.DATA:
            self.step = Step.AFTER
            return None
        before = self._words(0)
        if self.step is Step.BEFORE:
            if not is_complete(before, self._request):
                return self._reply(Verdict.WAIT, before)
            self.step = Step.DATA
            return None
        return self._reply(judge(before, self._words(WORDS_BYTES), self._request), before)

    def _words(self, start: int) -> CopiedWords:
        words = self._target.scratch[start : start + WORDS_BYTES]
        if bytes(words[:IDENTITY_BYTES]) != self._places.identity:
            raise StaleError
        header = bytes(words[_HEADER_AT : _HEADER_AT + len(HEADER_WORDS)])
        return CopiedWords.unpack(header, bytes(words[_BLOCK_AT : _BLOCK_AT + BLOCK_BYTES]))

    def _reply(self, verdict: Verdict, words: CopiedWords) -> ReadReply:
        return ReadReply(
            serial=self.serial,
            status=verdict.value,
            incarnation=words.incarnation,
            sequence=sequence(words, self._request),
            error="",
        )
