"""Shallow copies of Hugging Face modules with replaced children, to observe a decoder's structure.

A *shell* shares every child of the module that it copies, except those overridden by plain
callables. To run a shell is to run the original forward code around them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.host.errors import ConfigError, PenstockError, reason

LayerSink = Callable[[int, tuple[Any, ...], dict[str, Any]], torch.Tensor]
"""Called in place of a layer with its index and arguments; returns the hidden states after it,
(micro_batch, sequence, hidden)."""


_MOST_RESULTS = 2
"""Results of a layer that a decoder may expect: hidden states, and attention weights or a cache."""


@contextmanager
def refused(explain: Callable[[Exception], str]) -> Iterator[None]:
    """Runs code of transformers or of a model inside; any error becomes a ConfigError.

    Each type of model has its own checks, so any kind of error may come. ``explain`` returns the
    message for an error; errors of Penstock pass unchanged.

    Raises:
        ConfigError: the code inside raised.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
            raise ConfigError(f"{error.strerror}: set TMPDIR to a folder of yours") from error
        raise ConfigError(explain(error)) from error


def shell(module: nn.Module, overrides: Mapping[str, Any], *, training: bool = False) -> Any:
    """Returns a shallow copy of ``module`` with the attributes in ``overrides`` replaced. A dotted
    name is an attribute of a descendant; the modules on the way become shells, too.

    ``training`` is the mode of the shells' own forwards; children keep their mode.
    """
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    clone.training = training
    here = {name: value for name, value in overrides.items() if "." not in name}
    deeper: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        name, _, rest = path.partition(".")
        if rest:
            deeper.setdefault(name, {})[rest] = value
    for name, inner in deeper.items():
        here[name] = shell(module.get_submodule(name), inner, training=training)
    for name, value in here.items():
        clone._modules.pop(name, None)
        # Python finds a name in the instance's dictionary before nn.Module's own lookup, for values
        # of any type.
        vars(clone)[name] = value
    return clone


def children_around(decoder: nn.Module, layers_name: str) -> dict[str, nn.Module]:
    """Returns the modules of a decoder outside its layers, by dotted name in the order of the
    modules. They are its children, and those of the modules that contain the layers (an encoder's
    list).
    """
    around: dict[str, nn.Module] = {}
    first, _, rest = layers_name.partition(".")
    for name, child in decoder.named_children():
        if name != first:
            around[name] = child
        elif rest:
            inner = children_around(child, rest)
            around |= {f"{name}.{path}": module for path, module in inner.items()}
    return around


class LayerStub:
    """Stands for a layer in the decoder's loop: has its attributes, and hands its arguments to a
    sink.
    """

    def __init__(self, layer: nn.Module, index: int, sink: LayerSink, results: int) -> None:
        self._layer, self._index, self._sink, self._results = layer, index, sink, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._sink(self._index, args, kwargs)
        return (hidden, *[None] * (self._results - 1)) if self._results else hidden


def layer_stubs(layers: Sequence[nn.Module], sink: LayerSink, *, results: int) -> list[LayerStub]:
    """Returns one stub per layer, in a plain list, which the decoder may slice, index and loop
    over. ``results``: see :class:`Order`.
    """
    return [LayerStub(layer, index, sink, results) for index, layer in enumerate(layers)]


class ModuleStub:
    """Stands for a module: has its attributes, and a function for its forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class WeightlessStub:
    """A stand-in for a module with parameters, if only the shape of its result matters.

    Passes hidden states, floating and of three axes, through. From other input it makes ``filler``,
    (micro_batch, sequence, hidden) in the compute dtype.
    """

    def __init__(self, filler: torch.Tensor) -> None:
        self._filler = filler

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3:
                return value
        return self._filler


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which the decoder's children with parameters run, relative to its layers.

    ``embeds_alone`` names the child that alone makes the first layer's input from the token ids.
    ``finishes_alone`` names the child that alone makes the result from the last layer's output.
    Both are None if other code takes part. ``layer_results`` is the length of the tuple that the
    decoder expects of a layer, hidden states first. It is 0 for hidden states alone.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    embeds_alone: str | None
    finishes_alone: str | None
    layer_results: int


def observe_order(decoder: nn.Module, layers_name: str, hidden_size: int) -> Order:
    """Runs the decoder's forward over stubs and records the children before the first and after the
    last layer.

    Raises:
        ConfigError: the decoder does not call its layers one after the other. Or it passes them
            state that depends on parameters or is mutable, or calls a child both before and after
            them.
    """
    failures = []
    for results in range(_MOST_RESULTS + 1):
        try:
            first = _Observation(decoder, layers_name, hidden_size, results, filler=0.0)
            order = first.run()
            second = _Observation(decoder, layers_name, hidden_size, results, filler=1.0)
            second.run()
            _Observation(decoder, layers_name, hidden_size, results, filler=0.0).run_around()
        except PenstockError:
            raise
        except Exception as error:  # any error of the decoder on stubs
            failures.append(reason(error))
            continue
        _refuse_carried_state(decoder, first.extras, second.extras)
        return order
    raise ConfigError(
        f"model: the forward of {type(decoder).__name__} cannot be taken apart into layers"
        f" ({'; '.join(dict.fromkeys(failures))}); this architecture is not supported"
    )


def _refuse_carried_state(
    decoder: nn.Module, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> None:
    """Refuses a decoder that passes results of modules, or mutable state, to its layers. Arguments
    must follow from the batch alone.

    Two runs with different numbers from the stubs reveal results of modules.
    """
    for one, other in zip(first, second, strict=True):
        for key, value in one.items():
            mutable = isinstance(value, (dict, list, set))
            computed = isinstance(value, torch.Tensor) and not torch.equal(value, other[key])
            if mutable or computed:
                raise ConfigError(
                    f"model: layers of {type(decoder).__name__} share {key!r}, which does not"
                    " follow from the batch; this architecture is not supported"
                )


class _Observation:
    """One trial run of a decoder over stubs, with two sequences of three tokens."""

    _BATCH, _SEQUENCE = 2, 3

    def __init__(
        self,
        decoder: nn.Module,
        layers_name: str,
        hidden_size: int,
        results: int,
        filler: float,
    ) -> None:
        self.extras: list[dict[str, Any]] = []
        self._decoder, self._results = decoder, results
        self._layers_name = layers_name
        self._shape = (self._BATCH, self._SEQUENCE, hidden_size)
        self._stub = WeightlessStub(torch.full(self._shape, filler))
        self._next_layer = 0
        self._ids = torch.zeros(self._BATCH, self._SEQUENCE, dtype=torch.long)
        self._first_hidden = self._last_hidden = torch.empty(0)
        self._calls_before: list[_ChildCall] = []
        self._calls_after: list[_ChildCall] = []
        layers = list(decoder.get_submodule(layers_name).children())
        self._num_layers = len(layers)
        self._overrides: dict[str, Any] = {
            layers_name: layer_stubs(layers, self._on_layer, results=results)
        }
        self._around = children_around(decoder, layers_name)
        for name, child in self._around.items():
            if any(True for _ in child.parameters()):
                self._overrides[name] = ModuleStub(child, self._watching(name))

    def run(self) -> Order:
        """Runs the decoder from token ids, as the embedding's block does.

        Raises:
            ConfigError: a child runs both before and after the layers, or between them.
            ValueError: layers are not called once each, in order, on hidden states.
        """
        with torch.no_grad():
            # In training mode, so that dropout around a module shows.
            decoder = shell(self._decoder, self._overrides, training=True)
            result = decoder(input_ids=self._ids, use_cache=False)[0]
        if self._next_layer != self._num_layers or result.shape != self._shape:
            raise ValueError(f"{self._next_layer} of {self._num_layers} layers were called")
        seen_before = {call.name for call in self._calls_before}
        both = seen_before & {call.name for call in self._calls_after}
        if both:
            raise ConfigError(
                f"model: {', '.join(sorted(both))} of {type(self._decoder).__name__} run both"
                " before and after the layers; this architecture is not supported"
            )
        names = list(self._around)
        before = tuple(n for n in names if n in seen_before)
        # Modules that never ran without a cache or labels still have parameters; they stay with the
        # head.
        unseen = set(self._overrides) - {self._layers_name} - set(before)
        return Order(
            before=before,
            after=tuple(n for n in names if n in unseen),
            embeds_alone=_alone(self._calls_before, self._ids, self._first_hidden),
            finishes_alone=_alone(self._calls_after, self._last_hidden, result),
            layer_results=self._results,
        )

    def run_around(self) -> None:
        """Runs from hidden states that take no memory, as workers do for masks and positions."""
        with torch.no_grad():
            states = torch.zeros(1, 1, 1).expand(self._shape)
            shell(self._decoder, self._overrides)(inputs_embeds=states, use_cache=False)

    def _watching(self, name: str) -> Callable[..., torch.Tensor]:
        def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
            if 0 < self._next_layer < self._num_layers:
                raise ConfigError(
                    f"model: {type(self._decoder).__name__} runs {name} between its layers;"
                    " this architecture is not supported"
                )
            # A copy has memory of its own, by which _alone recognizes the result that the decoder
            # passes on.
            output = self._stub(*args, **kwargs).clone()
            calls = self._calls_after if self._next_layer else self._calls_before
            calls.append(_ChildCall(name=name, args=args, kwargs=kwargs, output=output))
            return output

        return watched

    def _on_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        hidden, rest = split_hidden(args, kwargs)
        if index != self._next_layer or hidden.shape != self._shape:
            raise ValueError(
                f"layer {index} was called when {self._next_layer} was due, with hidden states of"
                f" shape {tuple(hidden.shape)}, expected {self._shape}"
            )
        self.extras.append(rest)
        if self._next_layer == 0:
            self._first_hidden = hidden
        self._next_layer += 1
        self._last_hidden = hidden.clone()
        return self._last_hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChildCall:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


def _alone(calls: list[_ChildCall], given: torch.Tensor, result: torch.Tensor) -> str | None:
    """Returns the name of the child that turned ``given`` into ``result`` by one call, views aside.
    None: other code took part.
    """
    if len(calls) != 1 or calls[0].kwargs or len(calls[0].args) != 1:
        return None
    same_input = calls[0].args[0] is given
    same_output = calls[0].output.data_ptr() == result.data_ptr()
    return calls[0].name if same_input and same_output else None


def split_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the hidden states of a layer call, (micro_batch, sequence, hidden), and its other
    arguments by name, or by position as a string.
    """
    if args:
        return args[0], {**{str(i): v for i, v in enumerate(args) if i}, **kwargs}
    rest = dict(kwargs)
    return rest.pop("hidden_states"), rest
