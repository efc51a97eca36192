"""The schemes by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.schemes import (
    bpipe,
    chimera,
    dualpipe_v,
    gpipe,
    hanayo,
    interleaved,
    megatron_offload,
    mobius,
    naive,
    one_f_one_b,
    spipe,
    zb_h1,
    zb_v,
    zero3_offload,
)
from penstock.planner.schemes.base import Recomputation, RecomputeMode, Scheme, StageDevices

_ALL = (
    naive.SCHEME,
    gpipe.SCHEME,
    one_f_one_b.SCHEME,
    one_f_one_b.SCHEME_2,
    interleaved.SCHEME,
    chimera.SCHEME,
    hanayo.SCHEME,
    zb_h1.SCHEME,
    zb_v.SCHEME,
    dualpipe_v.SCHEME,
    bpipe.SCHEME,
    mobius.SCHEME,
    megatron_offload.SCHEME,
    spipe.SCHEME,
    zero3_offload.SCHEME,
)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _ALL})
"""Every scheme that ``schedule.scheme`` can name."""

__all__ = ["SCHEMES", "Recomputation", "RecomputeMode", "Scheme", "StageDevices"]
