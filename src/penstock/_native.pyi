"""C++ part of Penstock: optimizer sweeps over shared memory, their threads, and atomic words; the
simulator's event core.

Arrays of the sweeps are one-dimensional, contiguous numpy arrays of n elements, n a positive
multiple of 16, that start at a multiple of 64 bytes; nothing is copied. ``uint16`` arrays hold bf16
(gradients; weights with ``BFLOAT16``) or fp16 (weights with ``FLOAT16``) bit patterns; gradients in
fp16 are ``float16`` arrays. Wrong arguments raise ValueError or TypeError (BufferError for buffers)
before anything is written. Every sweep releases the GIL; sweeps on one pool take turns.

``master`` is a float32 array, or a *split* one: a pair (upper halves, lower halves) of ``uint16``
arrays. The upper halves, rounded half up in the bits, are the bf16 weights of the state's version;
a sweep writes the lower ones, and those of the next version into ``weights``, another slot
(advance: the slot that it settles away from). ``arrays`` are the optimizer's own: Adam and AdamW
have two (exp_avg, exp_avg_sq), SGD (momentum), Lion (exp_avg) and Adagrad (sum of squares) one.

All sweeps give the same bits on every vector path and with any number of threads, and ``advance``
the same as ``settle`` followed by ``preview``, as long as the summed gradients are finite.
``native/sweeps.h`` describes the sweeps, ``native/undo.h`` the undo area.
"""

from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

_Bytes: TypeAlias = Buffer | NDArray[Any]  # for type checkers, arrays are buffers since Python 3.12
_Floats: TypeAlias = NDArray[np.float32]
_FloatsOrBits: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
_Gradients: TypeAlias = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
_Master: TypeAlias = NDArray[np.float32] | tuple[NDArray[np.uint16], NDArray[np.uint16]]
_Ranges: TypeAlias = Sequence[tuple[int, int, float, float]]
_Spans: TypeAlias = Sequence[tuple[int, int]]

def load_u64(buffer: _Bytes, byte_offset: int) -> int:
    """Atomic load (acquire) of the 8-byte word at an aligned offset."""

def store_u64(buffer: _Bytes, byte_offset: int, value: int) -> None:
    """Atomic store (release)."""

def fetch_add_u64(buffer: _Bytes, byte_offset: int, addend: int) -> int:
    """Atomically add, modulo 2**64; returns the value before."""

def compare_exchange_u64(buffer: _Bytes, byte_offset: int, expected: int, desired: int) -> bool:
    """Atomically replace ``expected`` by ``desired``; says whether the word held ``expected``."""

class WeightsDtype(Enum):
    """What a sweep writes into ``weights``."""

    FLOAT32 = ...
    BFLOAT16 = ...
    FLOAT16 = ...

class Hyper:
    """Hyper-parameters of one optimizer step. ``optimizer`` is the name of a step in
    ``native/steps.h``; it ignores those that it does not have. SGD's momentum is ``beta1``.

    ``step`` is t >= 1 of the bias corrections; ``coefficient`` multiplies the summed gradients
    (clip coefficient times inverse loss scale). Immutable.

    Raises:
        ValueError: naming the argument, its value and what would do.
    """

    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        coefficient: float = 1.0,
        optimizer: str = "adamw",
    ) -> None: ...
    @property
    def lr(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def coefficient(self) -> float: ...
    @property
    def optimizer(self) -> str: ...

class Status:
    """What a sweep learned about the summed gradients (before the coefficient)."""

    @property
    def finite(self) -> bool: ...
    @property
    def sum_squares(self) -> float:
        """Float64 sum of squares; not finite when ``finite`` is false."""

class UndoState:
    """What an undo area says; see :func:`undo_state`."""

    @property
    def armed(self) -> bool:
        """A sweep runs, was cut short, or was repaired and not yet completed."""

    @property
    def tag(self) -> int:
        """Tag of the sweep that was armed last."""

    @property
    def completed(self) -> int:
        """Tag of the sweep that finished last."""

class Pool:
    """Threads pinned to cores, one a listed core, until :meth:`close` or the end of ``with``.

    ``vector_path`` forces one of :func:`available_vector_paths`. RuntimeError when a thread cannot
    run on its core, when the pool is closed, or in a forked child.
    """

    def __init__(self, cores: Sequence[int], *, vector_path: str = "") -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def vector_path(self) -> str: ...
    def close(self) -> None:
        """Wait for a running sweep, then stop and join the threads. May be repeated."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def vector_path() -> str:
    """The path that pools use on this processor: "avx512", "avx2" or "portable"."""

def available_vector_paths() -> list[str]:
    """The paths that this processor can run, fastest first."""

def preview(
    pool: Pool,
    *,
    master: _Master,
    arrays: Sequence[_Floats],
    grads: Sequence[_Gradients],
    weights: _FloatsOrBits,
    weights_dtype: WeightsDtype,
    hyper: Hyper,
    ranges: _Ranges,
) -> Status:
    """Write the weights that a step with these gradients leads to; master and state stay.

    ``grads`` are 1 to 12 contributions of one dtype, summed in list order in float32. ``ranges``
    are (start, end, weight decay, rate), bounds multiples of 16, covering [0, n) in order; the rate
    multiplies the learning rate.
    """

def settle(
    pool: Pool,
    *,
    master: _Master,
    arrays: Sequence[_Floats],
    grads: Sequence[_Gradients],
    hyper: Hyper,
    ranges: _Ranges,
    undo: _Bytes,
    spans: _Spans | None = None,
    tag: int = 0,
) -> None:
    """Write master and state.

    ``undo`` is :func:`undo_bytes` of writable memory, zero at first, 64-byte aligned, that
    outlives the process. ``spans`` restricts the sweep to sorted [start, end), bounds multiples of
    16. ``tag`` names the sweep in the undo area; a later sweep with a *different* tag can be told
    apart after a crash.

    RuntimeError when the area is armed: :func:`repair` first. After a repair only the sweep that
    completes it is accepted: ``spans`` as returned by repair, and the same tag.
    """

def advance(
    pool: Pool,
    *,
    master: _Master,
    arrays: Sequence[_Floats],
    pending_grads: Sequence[_Gradients],
    pending_hyper: Hyper,
    grads: Sequence[_Gradients],
    hyper: Hyper,
    weights: _FloatsOrBits,
    weights_dtype: WeightsDtype,
    ranges: _Ranges,
    undo: _Bytes,
    spans: _Spans | None = None,
    tag: int = 0,
) -> Status:
    """:func:`settle` with the pending gradients, :func:`preview` with the new ones, in one sweep.

    ``pending_grads`` and ``grads`` have one dtype. The status is that of ``grads`` within
    ``spans``. An advance that was cut short is repaired and completed by a settle with the pending
    gradients.
    """

def step_in_place(
    pool: Pool,
    *,
    master: _Master,
    arrays: Sequence[_Floats],
    grads: Sequence[_Gradients],
    weights: _FloatsOrBits,
    weights_dtype: WeightsDtype,
    hyper: Hyper,
    ranges: _Ranges,
) -> Status:
    """The classic step: master, state and weights at once, without undo."""

def hold(
    pool: Pool,
    *,
    master: _Master,
    arrays: Sequence[_Floats],
    grads: Sequence[_Gradients],
    weights: _FloatsOrBits,
    weights_dtype: WeightsDtype,
    hyper: Hyper,
    ranges: _Ranges,
    undo: _Bytes,
    spans: _Spans | None = None,
    tag: int = 0,
) -> Status:
    """:func:`step_in_place`, crash safe: for gradients that were looked at before. One that was cut
    short is repaired and completed by itself, or by a settle and a new cast of the weights.
    """

def invert(
    pool: Pool,
    *,
    master: _Master,
    arrays: Sequence[_Floats],
    grads: Sequence[_Gradients],
    hyper: Hyper,
    ranges: _Ranges,
    undo: _Bytes,
    spans: _Spans | None = None,
    tag: int = 0,
) -> None:
    """Take a step in place back by arithmetic (the papers' rollback): what it rounded away is lost,
    and after Inf or NaN everything. ``master`` must not be split.
    """

def gradient_status(pool: Pool, *, grads: Sequence[_Gradients]) -> Status:
    """Only the status that :func:`preview` would return."""

def cast_weights(
    pool: Pool, *, master: _Floats, weights: _FloatsOrBits, weights_dtype: WeightsDtype
) -> None:
    """Write the weights that belong to a settled ``master``."""

def undo_bytes(num_threads: int) -> int:
    """Size of an undo area for sweeps on up to ``num_threads`` threads, or as many spans."""

def undo_state(undo: _Bytes) -> UndoState:
    """Read an undo area without changing it.

    After a crash, for the sweep that was started with tag X: ``armed`` and ``tag == X``: repair,
    then settle the returned spans; not armed and ``completed == X``: it finished; else it wrote
    nothing.
    """

def repair(undo: _Bytes, *, master: _Master, arrays: Sequence[_Floats]) -> list[tuple[int, int]]:
    """Put back vectors that a killed sweep left half-written; returns the spans it did not settle.

    Settling these spans with the same gradients, hyper-parameters, ranges and tag gives the state
    of an undisturbed sweep. The area stays armed until then, so that repair, and that settle, may
    be killed and repeated. Returns [] for an idle area. No process may run a sweep on the area
    meanwhile.
    """

def round_halves(
    *, high: NDArray[np.uint16], low: NDArray[np.uint16], out: NDArray[np.uint16]
) -> bool:
    """Writes the float32 numbers of a split master into ``out`` in bf16, rounded to nearest even.

    One-dimensional contiguous arrays of one length. False, with any content of ``out``, if a number
    may be zero, infinite or NaN: the halves alone do not say which.
    """

def simulate_tasks(
    *,
    seconds: NDArray[np.float64],
    amounts: NDArray[np.float64],
    delays: NDArray[np.float64],
    routes: NDArray[np.int32],
    unordered: NDArray[np.uint8],
    edge_tasks: NDArray[np.int32],
    edge_needs: NDArray[np.int32],
    queue_offsets: NDArray[np.int64],
    queue_tasks: NDArray[np.int32],
    route_limits: NDArray[np.float64],
    route_offsets: NDArray[np.int64],
    route_resources: NDArray[np.int32],
    capacities: NDArray[np.float64],
    record_rates: bool = False,
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[tuple[float, int, float]]]:
    """When each task starts and ends; NaN for those that wait for each other in a circle.

    One-dimensional contiguous arrays; ``native/simulate.h`` says what they mean. The list holds
    (time, task, rate) whenever the rate of a flow changes, and is empty without ``record_rates``.
    Equal arguments give equal bits. ValueError names an array and an element that make no sense.
    """
