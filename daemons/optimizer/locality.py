"""Whether the pages of the optimizer's state lie on the NUMA nodes of their threads.

Asked of the kernel for a sample of pages, spread evenly; memoryd places them when it makes the
segments, and a segment that was adopted may stem from a run with other cores.
"""

from __future__ import annotations

import logging

from penstock.protocol.plan.placement import Placement, page_places
from penstock.shm.layout import PAGE_BYTES, SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.pages import NodeRange, nodes_of_pages

MAX_SAMPLES = 4096

_log = logging.getLogger(__name__)


def local_ratio(memory: NodeMemory, placement: Placement) -> float | None:
    """Returns the share of the state's pages (0 to 1) that lie where :func:`page_places` wants
    them, or None where the kernel does not say.
    """
    buffer = memory.segment_buffer(SegmentKind.STATE)
    spec = memory.spec
    wanted = _sample(page_places(placement, spec.layout, spec.table)[SegmentKind.STATE])
    if buffer is None or not wanted:
        return None
    try:
        found = nodes_of_pages(buffer, list(wanted))
    except OSError as error:
        _log.info("where the state's pages lie is not known: %s", error)
        return None
    known = [
        node == wanted[offset]
        for offset, node in zip(wanted, found, strict=True)
        if node is not None
    ]
    return sum(known) / len(known) if known else None


def _sample(ranges: list[NodeRange]) -> dict[int, int]:
    """Returns a sample of pages: offset in bytes -> the NUMA node that the page belongs on."""
    step = -(-sum(wanted.num_bytes for wanted in ranges) // MAX_SAMPLES // PAGE_BYTES) * PAGE_BYTES
    return {
        offset: wanted.node
        for wanted in ranges
        for offset in range(wanted.offset, wanted.offset + wanted.num_bytes, max(step, PAGE_BYTES))
    }
