"""The network between the hosts of a :class:`tests.integration.netbed.NetBed`, as a process.

Each host has a TUN device whose other end is a descriptor here; what one sends is written into the
device of whoever has the destination's address, late, in part, or not at all. Packets are bursts of
up to 64 KiB with a virtio header (TSO), so that Python keeps up with several Gb/s.

``python forwarder.py NAME=DEVICE …`` makes the devices, says ``ready``, and then obeys JSON
objects, one a line on stdin, each answered by ``done``. It ends with its stdin, and the devices end
with it.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums and TSO of IPv4
_VIRTIO_HEADER = 10
_LARGEST = _VIRTIO_HEADER + (1 << 16)
_TCP, _SYN = 6, 0x02


@dataclass(slots=True)
class Link:
    """One direction between two hosts. ``loss``: share of bursts. ``forgotten``: connections that
    began before are dropped, as by a firewall that lost its memory; ``known``: later ones.
    """

    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0
    forgotten: bool = False
    known: set[bytes] = field(default_factory=set)
    bursts: int = 0


class Forwarder:
    """Moves packets between devices, on one thread."""

    def __init__(self, devices: dict[str, str]) -> None:
        self._names = {_open_tun(device): name for name, device in devices.items()}
        self._descriptors = {name: fd for fd, name in self._names.items()}
        self._hosts: dict[bytes, str] = {}
        self._links = {pair: Link() for pair in itertools.permutations(devices, 2)}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._random = random.Random(1)

    def run(self) -> None:
        """Forward until stdin ends."""
        poller = select.epoll()
        for descriptor in self._names:
            poller.register(descriptor, select.EPOLLIN)
        poller.register(sys.stdin.fileno(), select.EPOLLIN)
        while True:
            due_s = self._late[0][0] - time.monotonic() if self._late else -1.0
            for ready, events in poller.poll(max(0.0, due_s) if self._late else None):
                if ready in self._names and events & select.EPOLLERR:
                    poller.unregister(ready)  # the host has gone, and the device with it
                elif ready in self._names:
                    self._take(ready)
                else:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self._obey(json.loads(line))
                    print("done", flush=True)
            self._deliver()

    def _obey(self, order: dict[str, Any]) -> None:
        if "addresses" in order:
            packed = {bytes(map(int, a.split("."))): n for a, n in order["addresses"].items()}
            self._hosts = packed
            return
        link = self._links[order["source"], order["target"]]
        for name, value in order["change"].items():
            setattr(link, name, value)
        if "forgotten" in order["change"]:
            link.known.clear()

    def _take(self, descriptor: int) -> None:
        """Read what is there, but let other devices and the clock have their turn."""
        for _ in range(32):
            try:
                packet = os.read(descriptor, _LARGEST)
            except OSError:
                return  # nothing more there, or the device has gone with its host
            self._pass_on(self._names[descriptor], packet)

    def _pass_on(self, source: str, packet: bytes) -> None:
        ip = _VIRTIO_HEADER
        target = self._hosts.get(packet[ip + 16 : ip + 20])
        if packet[ip] >> 4 != 4 or target is None or target == source:
            return
        # An address that its host does not have any more is nobody's, whoever sends from it.
        if self._hosts.get(packet[ip + 12 : ip + 16]) != source:
            return
        link = self._links[source, target]
        if link.cut or (link.forgotten and self._is_forgotten(link, packet)):
            return
        if link.loss and self._random.random() < link.loss:
            return
        link.bursts += 1
        if link.delay_s:
            due_s = time.monotonic() + link.delay_s
            entry = (due_s, next(self._count), self._descriptors[target], packet)
            heapq.heappush(self._late, entry)
        else:
            _write(self._descriptors[target], packet)

    def _is_forgotten(self, link: Link, packet: bytes) -> bool:
        ip = _VIRTIO_HEADER
        transport = ip + 4 * (packet[ip] & 15)
        if packet[ip + 9] != _TCP:
            return False
        here, there = packet[transport : transport + 2], packet[transport + 2 : transport + 4]
        flow = min(here, there) + max(here, there)
        if packet[transport + 13] & _SYN:
            for direction in self._links.values():
                direction.known.add(flow)
        return flow not in link.known

    def _deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, descriptor, packet = heapq.heappop(self._late)
            _write(descriptor, packet)


def _open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    return descriptor


def _write(descriptor: int, packet: bytes) -> None:
    try:
        os.write(descriptor, packet)
    except OSError:
        pass  # the device is down: its host has gone, or changes its address


if __name__ == "__main__":
    forwarder = Forwarder(dict(argument.split("=") for argument in sys.argv[1:]))
    print("ready", flush=True)
    forwarder.run()
