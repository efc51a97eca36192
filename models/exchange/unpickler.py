"""An interpreter of pickles that imports nothing and calls nothing of the pickle's choice.

:func:`pickletools.genops` reads the opcodes. Containers, numbers and texts become those of Python.
A class or function of the pickle becomes a :class:`StandIn`, and so does the result of its call.
Full names in the caller's table of constructors are the exception. Each opcode has at least one
byte, allocates less than 4 KiB beyond its argument, and costs constant time.

The hash of a number is no secret, so a stranger can choose numbers that collide in a dictionary.
Numbers and tuples as keys therefore become texts, as in JSON. A set becomes a list.
"""

from __future__ import annotations

import math
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MAX_PICKLE_BYTES = 64 * 2**20
"""Longest pickle. Tensors' numbers are not part of the pickle."""

MAX_OBJECTS = 4_000_000
"""Most containers, calls, texts and remembered values of a pickle."""

MAX_KEY_ITEMS = 16
"""Longest tuple as a key of a dictionary: a tuple is written out at each use."""

_MAX_NAME = 1000
"""Most characters of the module and the name of a class or function, together."""

_MAX_BITS = 1023
"""Most bits of an integer. Larger ones become infinite: they have no float, and Python does not
print the largest.
"""


class PickleError(Exception):
    """A pickle is damaged, or uses a feature that no checkpoint needs. ``remedy``: advice for the
    user, which follows the message.
    """

    def __init__(self, message: str, remedy: str = "copy the checkpoint again") -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(slots=True, eq=False, repr=False)
class StandIn:
    """An object, a class or a function of a pickle that is neither imported nor called.

    ``name``: the full name of the class or function. ``args`` None: the class or function itself;
    else the arguments of its call. ``state``: the argument of ``__setstate__``, usually a
    dictionary of attributes. ``items``: elements or pairs, if the class is a list or a dictionary.
    """

    name: str
    args: tuple[Any, ...] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"StandIn({self.name!r})"

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes in ``state``; empty if the state has another form."""
        # Those of a class with __slots__ are a pair. A longer tuple may repeat one dictionary.
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        if len(parts) > 2:
            return {}
        attributes: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                attributes |= {key: value for key, value in part.items() if isinstance(key, str)}
        return attributes


Constructor = Callable[[tuple[Any, ...]], Any]
"""Makes a value of the arguments of an allowed call; raises PickleError for other arguments."""


def _ordered(args: tuple[Any, ...]) -> Any:
    pairs = args[0] if args else []
    result: OrderedDict[Any, Any] = OrderedDict()
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise PickleError("an OrderedDict has an item that is no pair")
        _set(result, pair[0], pair[1])
    return result


def _sequence(args: tuple[Any, ...]) -> list[Any]:
    if not args:
        return []
    if len(args) > 1 or not isinstance(args[0], list | tuple):
        raise PickleError("a sequence is made of no list")
    return list(args[0])


def _bytes(args: tuple[Any, ...]) -> bytes:
    """Returns bytes of protocol 2, which are a text with a character per byte."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise PickleError("bytes have an encoding other than latin1")
    return args[0].encode("latin-1")


CONTAINERS: Mapping[str, Constructor] = MappingProxyType(
    {
        "collections.OrderedDict": _ordered,
        "collections.defaultdict": lambda args: {},
        "collections.deque": _sequence,
        "_codecs.encode": _bytes,
        **{
            f"{module}.{name}": made
            for module in ("builtins", "__builtin__")
            for name, made in (
                ("list", _sequence),
                ("tuple", lambda args: tuple(_sequence(args))),
                ("set", _sequence),
                ("frozenset", _sequence),
                ("dict", lambda args: dict(_ordered(args))),
            )
        },
    }
)
"""Constructors of containers, by full name."""


def _key(value: Any) -> str | StandIn:
    """Returns a key of a dictionary: a text, or an object, which is hashed by its address."""
    if isinstance(value, str | StandIn):
        return value
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > MAX_KEY_ITEMS:
        raise PickleError(f"a key of a dictionary is a tuple of over {MAX_KEY_ITEMS} values")
    for part in parts:
        if not isinstance(part, str | bytes | int | float | StandIn | None):
            raise PickleError(f"a key of a dictionary is of type {type(part).__name__}")
    objects = "".join(f"#{id(part):x}" for part in parts if isinstance(part, StandIn))
    return f"{value!r}{objects}"


def _set(target: dict[Any, Any], key: Any, value: Any) -> None:
    """Sets an item of a dictionary. A repeated key is refused: 1 and '1' would be one text."""
    key = _key(key)
    if key in target:
        raise PickleError(f"a dictionary has the key {str(key)[:40]!r} twice")
    target[key] = value


_MARK = object()


class Unpickler:
    """One pickle's stack and memo. ``constructors`` and ``values`` are what the pickle may name;
    ``persistent`` makes a value of a persistent identifier.
    """

    def __init__(
        self,
        constructors: Mapping[str, Constructor],
        values: Mapping[str, Any],
        persistent: Callable[[Any], Any],
    ) -> None:
        self._constructors, self._values, self._persistent = constructors, values, persistent
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._num_objects = 0

    def load(self, data: bytes) -> Any:
        """Returns the value of a pickle.

        Raises:
            PickleError: the pickle is damaged, longer than the limits, or of an unknown form.
        """
        if len(data) > MAX_PICKLE_BYTES:
            raise PickleError(f"its pickle is longer than {MAX_PICKLE_BYTES >> 20} MiB")
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    return self._pop()
                self._step(opcode.name, argument)
        except (
            ValueError,  # an unknown opcode, a truncated argument, a text that is not UTF-8
            TypeError,
            LookupError,
            AttributeError,
            OverflowError,
        ) as error:
            raise PickleError(f"its pickle is damaged ({error})") from error
        raise PickleError("its pickle is truncated")

    def find_class(self, name: str) -> Any:
        """Returns the value of a global name: one of the table, or a stand-in. Imports nothing."""
        return self._values[name] if name in self._values else StandIn(name)

    def call(self, function: Any, args: Any, keywords: Mapping[str, Any] | None = None) -> Any:
        """Returns the value of a call: that of the table's constructor, or a stand-in."""
        if not isinstance(function, StandIn) or not isinstance(args, tuple):
            raise PickleError("its pickle calls a value that is no function")
        if function.args is not None:  # the result of a call is called in its turn
            return StandIn(f"{function.name.removesuffix('()')}()", args)
        if function.name in self._constructors and not keywords:
            # A constructor copies its argument, which the pickle may name again and again.
            self._count(len(args))
            self._count(sum(len(value) for value in args if isinstance(value, Sized)))
            return self._constructors[function.name](args)
        return StandIn(function.name, args, keywords or {})

    def _step(self, name: str, argument: Any) -> None:
        if name in _COUNTED:
            self._count(1)
        if name in _ARGUMENTS:
            if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
                argument = math.inf if argument > 0 else -math.inf
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        else:
            raise PickleError(f"its pickle has the opcode {name}, which no checkpoint needs")

    def _count(self, objects: int) -> None:
        self._num_objects += objects
        if self._num_objects > MAX_OBJECTS:
            raise PickleError(f"its pickle has over {MAX_OBJECTS:,} objects")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleError("its pickle is damaged (a mark in place of a value)")
        return value

    def _pops(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self._pop() for _ in range(count)]))

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        items.reverse()
        return items

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _put(self, index: int) -> None:
        """Remembers a value. Picklers number the values; a table of chosen numbers may be slow."""
        if not 0 <= index < MAX_OBJECTS:
            raise PickleError(f"its pickle remembers the value {index}")
        self._memo += [_MARK] * (index + 1 - len(self._memo))
        self._memo[index] = self._top()

    def _get(self, index: int) -> Any:
        value = self._memo[index] if index >= 0 else _MARK
        if value is _MARK:
            raise PickleError("its pickle names a value that it has not remembered")
        return value

    def _extend(self, items: list[Any]) -> None:
        target = self._top()
        if isinstance(target, StandIn):
            target.items += items
        elif isinstance(target, list):
            target += items
        else:
            raise PickleError("its pickle extends a value that is no list")

    def _set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise PickleError("its pickle has a key without a value")
        target, pairs = self._top(), zip(items[::2], items[1::2], strict=True)
        if isinstance(target, StandIn):
            target.items += pairs
        elif isinstance(target, dict):
            for key, value in pairs:
                _set(target, key, value)
        else:
            raise PickleError("its pickle sets items of a value that is no dictionary")

    def _dict(self) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, StandIn) and target.args is not None:
            target.state = state
        elif not isinstance(target, dict):  # attributes of an OrderedDict: a model's _metadata
            raise PickleError("its pickle sets the state of a value that has none")

    def _new(self, count: int) -> None:
        cls, args, *keywords = self._pops(count)
        if keywords and not isinstance(keywords[0], dict):
            raise PickleError("its pickle calls a class with keywords that are no dictionary")
        self._stack.append(self.call(cls, args, *keywords))

    def _object(self) -> None:
        cls, *args = self._since_mark()
        self._stack.append(self.call(cls, tuple(args)))

    def _instance(self, argument: str) -> None:
        args = self._since_mark()
        self._stack.append(self.call(self._named(argument), tuple(args)))

    def _named(self, argument: str) -> Any:
        """Returns the value of a module and a name, with a space in between."""
        if len(argument) > _MAX_NAME:
            raise PickleError(f"its pickle has a name of over {_MAX_NAME:,} characters")
        return self.find_class(argument.replace(" ", ".", 1))

    def _global(self) -> None:
        module, name = self._pops(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("its pickle has a name that is no text")
        # The argument of this opcode is on the stack, and may be named again and again.
        if len(module) + len(name) > _MAX_NAME:
            raise PickleError(f"its pickle has a name of over {_MAX_NAME:,} characters")
        self._stack.append(self.find_class(f"{module}.{name}"))


def _push(unpickler: Unpickler, value: Any) -> None:
    unpickler._stack.append(value)


def _drop(value: Any) -> None:
    """Forgets a value."""


_ARGUMENTS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BYTEARRAY8"),
    }
)
"""Opcodes that push their argument."""

_CONSTANTS: Mapping[str, Any] = MappingProxyType(
    {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
)
"""Values of opcodes that push always the same one."""

_ACTIONS: Mapping[str, Callable[[Unpickler, Any], None]] = MappingProxyType(
    {
        "PROTO": lambda self, argument: None,
        "FRAME": lambda self, argument: None,
        "EMPTY_LIST": lambda self, argument: _push(self, []),
        "EMPTY_DICT": lambda self, argument: _push(self, {}),
        "EMPTY_SET": lambda self, argument: _push(self, []),
        "LIST": lambda self, argument: _push(self, self._since_mark()),
        "TUPLE": lambda self, argument: _push(self, tuple(self._since_mark())),
        "TUPLE1": lambda self, argument: _push(self, self._pops(1)),
        "TUPLE2": lambda self, argument: _push(self, self._pops(2)),
        "TUPLE3": lambda self, argument: _push(self, self._pops(3)),
        "FROZENSET": lambda self, argument: _push(self, self._since_mark()),
        "DICT": lambda self, argument: self._dict(),
        "APPEND": lambda self, argument: self._extend([self._pop()]),
        "APPENDS": lambda self, argument: self._extend(self._since_mark()),
        "ADDITEMS": lambda self, argument: self._extend(self._since_mark()),
        "SETITEM": lambda self, argument: self._set_items(list(self._pops(2))),
        "SETITEMS": lambda self, argument: self._set_items(self._since_mark()),
        "POP": lambda self, argument: _drop(self._stack.pop()),
        "POP_MARK": lambda self, argument: _drop(self._since_mark()),
        "DUP": lambda self, argument: _push(self, self._top()),
        **dict.fromkeys(
            ("GET", "BINGET", "LONG_BINGET"),
            lambda self, argument: _push(self, self._get(argument)),
        ),
        **dict.fromkeys(
            ("PUT", "BINPUT", "LONG_BINPUT"), lambda self, argument: self._put(argument)
        ),
        "MEMOIZE": lambda self, argument: self._put(len(self._memo)),
        "GLOBAL": lambda self, argument: _push(self, self._named(argument)),
        "STACK_GLOBAL": lambda self, argument: self._global(),
        "REDUCE": lambda self, argument: self._new(2),
        "NEWOBJ": lambda self, argument: self._new(2),
        "NEWOBJ_EX": lambda self, argument: self._new(3),
        "OBJ": lambda self, argument: self._object(),
        "INST": lambda self, argument: self._instance(argument),
        "BUILD": lambda self, argument: self._build(),
        "PERSID": lambda self, argument: _push(self, self._persistent(argument)),
        "BINPERSID": lambda self, argument: _push(self, self._persistent(self._pop())),
    }
)
"""Opcodes that do more."""

_COUNTED = frozenset(_ACTIONS) - {"PROTO", "FRAME", "POP", "POP_MARK", "GET", "BINGET"}
_COUNTED |= {name for name in _ARGUMENTS if "STRING" in name or "UNI" in name or "BYTE" in name}
"""Opcodes that allocate."""
