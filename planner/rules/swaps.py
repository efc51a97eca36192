"""Rules of SWAP_OUT and SWAP_IN."""

from __future__ import annotations

from penstock.planner.rules.world import Broken, Device, Graph, World
from penstock.protocol.instructions import SwapIn, SwapOut


def swap_out(world: World, device: Device, swap: SwapOut) -> None:
    """Takes a part of what a FORWARD kept away from the device."""
    graph = _kept(device, swap)
    if graph.swapped is not None:
        raise Broken("a part of these activations was swapped out before")
    if not 0.0 < swap.fraction <= 1.0:
        raise Broken(f"fraction is {swap.fraction}, expected more than 0 and at most 1")
    if swap.peer is not None and (swap.peer >= len(world.devices) or swap.peer == device.index):
        raise Broken(f"wrong peer: there are {len(world.devices)} devices, and this is one")
    graph.swapped = (swap.fraction, swap.peer)


def swap_in(world: World, device: Device, swap: SwapIn) -> None:
    """Brings back what the SWAP_OUT with the same fields took."""
    del world
    graph = _kept(device, swap)
    if graph.swapped is None:
        raise Broken("these activations are not swapped out")
    if graph.swapped != (swap.fraction, swap.peer):
        fraction, peer = graph.swapped
        where = "the host" if peer is None else f"device {peer}"
        raise Broken(f"the SWAP_OUT took fraction {fraction} to {where}; this brings back another")
    graph.swapped = None


def _kept(device: Device, swap: SwapOut | SwapIn) -> Graph:
    graph = device.graphs.get((swap.stage, swap.micro_batch))
    if graph is None or not graph.forwarded:
        raise Broken("no activations: no FORWARD with keep=all or keep=selective ran before it")
    return graph
