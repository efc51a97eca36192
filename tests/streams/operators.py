"""Every operator of torch, as a device would run it: on a stream, in memory of the device.

Operators on the compute stream run at once; on other streams they are queued with the addresses of
what they read and write. Copies between host and device follow CUDA's rules: beside the host where
it was told so and the host's memory is registered or pinned; otherwise bytes of the host are taken
when the call returns, and a copy to the host is waited for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tests.streams.checker import Checker, extent
from tests.streams.clocks import this_thread
from tests.streams.gpu import CheckedGpu, gpu_of
from tests.streams.memory import Block
from tests.streams.streams import CheckedStream, Work

_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
"""They return something to the host."""

_COPIES = {"aten::copy_", "aten::_to_copy", "aten::to"}


class Watched(TorchDispatchMode):
    """Shows all operators of a thread to a checker."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return Operator(self._checker, func, tuple(args), dict(kwargs or {})).run()


class Operator:
    """One call."""

    def __init__(
        self, checker: Checker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.checker = checker
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func._schema.name

    def run(self) -> Any:
        """Returns what the operator returns."""
        given = [t for t in tree_flatten((self.args, self.kwargs))[0] if _plain(t)]
        gpu = self._gpu(given)
        with self.checker.lock:
            self.checker.operations += gpu is not None
            self.checker.collect()
        if gpu is None or self._is_view():
            if gpu is None and not self._is_view():
                self._log(this_thread())
            return self._now()
        return self._on(gpu, given)

    def _now(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def _is_view(self) -> bool:
        """It touches no bytes."""
        returns = self.func._schema.returns
        return self.name in ("aten::lift_fresh", "aten::detach") or any(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )

    def _gpu(self, given: Sequence[torch.Tensor]) -> CheckedGpu | None:
        """Returns the device that runs it."""
        device = self.kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "cpu" and device.index:
            self.kwargs["device"] = torch.device("cpu")
            return gpu_of(self.checker, device.index - 1)
        for gpu in self.checker.gpus.values():
            if any(gpu.holds(tensor) for tensor in given):
                return gpu
        # Code of models says ``device=tensor.device``, which is that of the host here.
        return self.checker.computing() if not given else None

    # ---- on a device ----

    def _on(self, gpu: CheckedGpu, given: Sequence[torch.Tensor]) -> Any:
        stream = gpu.current_stream()
        if self.name == "aten::_to_copy":
            return self._copied(gpu, stream)
        if self.name == "aten::copy_":
            return self._copy(gpu, stream, *self.args[:2], self._non_blocking())
        waits = self.name in _WAITING
        if waits:
            self.checker.host_waits(stream)
        if stream.eager or waits:
            with self.checker.lock:
                self.checker.issues(stream)
                self._log(stream.name)
            result = self._now()
            return self._moved(gpu, stream, result, given)
        return self._queued(gpu, stream, given)

    def _non_blocking(self) -> bool:
        return bool(self.kwargs.get("non_blocking", len(self.args) > 2 and self.args[2]))

    def _moved(
        self, gpu: CheckedGpu, stream: CheckedStream, result: Any, given: Sequence[torch.Tensor]
    ) -> Any:
        """What an operator made lies in the device's memory."""
        known = {tensor.untyped_storage()._cdata for tensor in given}
        homes: dict[int, torch.Tensor] = {}
        with self.checker.lock, _disable_current_modes():
            for tensor in filter(_plain, tree_flatten(result)[0]):
                storage = tensor.untyped_storage()
                if storage._cdata in known or gpu.holds(tensor) or storage.nbytes() == 0:
                    continue
                home = homes.get(storage._cdata)
                if home is None:
                    home = gpu.memory.take(storage.nbytes(), stream)
                    if self.name not in ("aten::empty", "aten::empty_strided"):
                        home.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
                        self._wrote(stream, home)
                    homes[storage._cdata] = home
                tensor.set_(
                    home.untyped_storage(),
                    tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
        return result

    def _wrote(self, stream: CheckedStream, home: torch.Tensor) -> None:
        address, num_bytes = extent(home)
        self.checker.access(stream.name, address, num_bytes, writes=True, what=self.name)

    def _queued(self, gpu: CheckedGpu, stream: CheckedStream, given: Sequence[torch.Tensor]) -> Any:
        """Run it later, on the same addresses; what it makes has its place now."""
        raw_args, raw_kwargs = tree_map(raw, (self.args, self.kwargs))
        func = self.func
        with self.checker.lock, _disable_current_modes():
            if any(a.alias_info is not None for a in func._schema.arguments):
                self._issue(stream, lambda: func(*raw_args, **raw_kwargs))
                return self._returned()
            shapes = func(*tree_map(_meta, self.args), **tree_map(_meta, self.kwargs))
            assert isinstance(shapes, torch.Tensor), f"{self.name} on a stream of copies"
            made = self._room(gpu, stream, shapes)
            target = raw(made)
            self._wrote(stream, made)
            self._issue(stream, lambda: target.copy_(func(*raw_args, **raw_kwargs)))
            return made

    def _room(self, gpu: CheckedGpu, stream: CheckedStream, like: torch.Tensor) -> torch.Tensor:
        num_bytes = max(1, like.numel()) * like.element_size()
        flat = gpu.memory.take(num_bytes, stream).view(like.dtype)
        return flat[: like.numel()].view(like.shape)

    def _issue(self, stream: CheckedStream, run: Callable[[], Any]) -> None:
        """Log it, and give it to a stream; holds the lock."""
        self.checker.issues(stream)
        self._log(stream.name)

        stream.issue(Work(run=quietly(run)))

    def _returned(self) -> Any:
        """Returns the argument that an operator writes into and returns."""
        for argument, value in self._arguments():
            if argument.alias_info is not None and argument.alias_info.is_write:
                return value
        raise AssertionError(self.name)

    # ---- copies ----

    def _copied(self, gpu: CheckedGpu, stream: CheckedStream) -> torch.Tensor:
        """``to``: a copy in new memory."""
        source: torch.Tensor = self.args[0]
        with self.checker.lock, _disable_current_modes():
            like = torch.empty_like(
                source,
                dtype=self.kwargs.get("dtype") or source.dtype,
                device="meta",
                memory_format=self.kwargs.get("memory_format") or torch.preserve_format,
            )
            made = torch.as_strided(
                self._room(gpu, stream, like).view(-1), like.shape, like.stride()
            )
        return self._copy(gpu, stream, made, source, self._non_blocking())

    def _copy(
        self,
        gpu: CheckedGpu,
        stream: CheckedStream,
        target: torch.Tensor,
        source: torch.Tensor,
        non_blocking: bool,
    ) -> torch.Tensor:
        checker = self.checker
        host = [tensor for tensor in (target, source) if not gpu.holds(tensor)]
        known = [self._pin(tensor, stream) for tensor in host]
        beside = not host or (non_blocking and all(known))
        with checker.lock, _disable_current_modes():
            checker.issues(stream)
            read, written = raw(source), raw(target)
            if host and not beside and host[0] is source:
                self._touch(this_thread(), source, writes=False)
                read = source.detach().clone()
            else:
                self._touch(stream.name, source, writes=False)
            if beside or host[0] is source:
                self._touch(stream.name, target, writes=True)

            stream.issue(Work(run=quietly(lambda: written.copy_(read))))
            if host and host[0] is target and not beside:
                checker.host_waits(stream)
                self._touch(this_thread(), target, writes=True)
            elif host and not non_blocking:
                checker.host_waits(stream)
        return target

    def _pin(self, tensor: torch.Tensor, stream: CheckedStream) -> bool:
        """Whether a tensor of the host is in memory that the driver knows."""
        region = self.checker.regions.at(tensor.data_ptr())
        for gpu in self.checker.gpus.values():
            block: Block | None = gpu.pinned_memory.block_of(tensor)
            if block is not None:
                block.kept_for.append(stream)
        return region is not None

    def _touch(self, actor: str, tensor: torch.Tensor, *, writes: bool) -> None:
        address, num_bytes = extent(tensor)
        self.checker.access(actor, address, num_bytes, writes=writes, what="copy")

    # ---- what it reads and writes ----

    def _arguments(self) -> Iterator[tuple[Any, Any]]:
        schema = self.func._schema.arguments
        yield from zip(schema, self.args, strict=False)
        by_name = {argument.name: argument for argument in schema}
        for name, value in self.kwargs.items():
            if name in by_name:
                yield by_name[name], value

    def _log(self, actor: str) -> None:
        with self.checker.lock:
            for argument, value in self._arguments():
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in filter(_plain, tree_flatten(value)[0]):
                    address, num_bytes = extent(tensor)
                    self.checker.access(actor, address, num_bytes, writes=writes, what=self.name)


def quietly(run: Callable[[], Any]) -> Callable[[], None]:
    """Returns work that nobody watches: it was logged when it was issued."""

    def unwatched() -> None:
        with _disable_current_modes(), torch.no_grad():
            run()

    return unwatched


def _plain(value: Any) -> bool:
    """A tensor with bytes of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
    )


def raw(value: Any) -> Any:
    """The same bytes, which nobody keeps alive for it."""
    if not _plain(value):
        return value
    with _disable_current_modes():
        _, num_bytes = extent(value)
        if num_bytes == 0:
            return value.detach()
        area = (ctypes.c_char * num_bytes).from_address(value.data_ptr())
        flat = torch.frombuffer(area, dtype=torch.uint8).view(value.dtype)
        return flat.as_strided(value.shape, value.stride())


def _meta(value: Any) -> Any:
    if not _plain(value):
        return torch.device("meta") if isinstance(value, torch.device) else value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
