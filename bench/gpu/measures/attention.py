"""TFLOP/s and bits of each attention that ``model.attention`` names, and of candidates for it.

Of a causal mask, and of documents inside a sequence, only scores that the mask leaves are counted:
``4 h d`` operations each in a forward, 2.5 times as many in a backward. A kernel that computes more
of the square shows fewer TFLOP/s.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import attention as implementations
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu.measures.timing import Timer
from bench.gpu.running import Task
from penstock.models.attention import CUDNN_FLASH, attend, choose_attention
from penstock.models.torch_device import repeat_bits

MASKS = ("causal", "documents")
LENGTHS, TINY_LENGTHS = (2048, 8192, 32_768), (32, 64)
REPEATS = 100
_TOKENS, _HEADS, _SIZE = 8192, 8, 128
_DOCUMENTS = 8
"""Documents of a sequence, equally long."""

_BITS_S = 1.5
"""Seconds of comparing a row's bits, beyond which fewer than :data:`REPEATS` are compared."""

_WORDS = 100
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """``choice``: a value of ``model.attention``, ``flex``, or ``flash3``."""

    choice: str
    deterministic: bool = True


CANDIDATES: Mapping[str, AttentionRow] = {
    "sdpa": AttentionRow(choice="sdpa"),
    "flash": AttentionRow(choice="flash"),
    "cudnn-flash": AttentionRow(choice=CUDNN_FLASH),
    "flex": AttentionRow(choice="flex"),
    "efficient": AttentionRow(choice="efficient"),
    "cudnn, not deterministic": AttentionRow(choice="cudnn", deterministic=False),
    "flash, not deterministic": AttentionRow(choice="flash", deterministic=False),
    "flash3": AttentionRow(choice="flash3"),
    "math": AttentionRow(choice="math"),
}
"""Rows of the table, in the order of measurement."""


def attention(task: Task) -> None:
    """Measures all candidates that run on the device: forward, backward, equal bits."""
    repeat_bits()
    lengths = TINY_LENGTHS if task.tiny else LENGTHS
    figures: dict[str, dict[str, Any]] = {}
    for mask in MASKS:
        for length in lengths:
            for name, candidate in CANDIDATES.items():
                rows = figures.setdefault(name, {})
                try:
                    rows[f"{mask} {length}"] = _row(task, candidate, length, mask)
                except (RuntimeError, ValueError, ImportError) as error:
                    words = " ".join(str(error).split())[:_WORDS]
                    rows[f"{mask} {length}"] = {"error": f"{type(error).__name__}: {words}"}
                if task.cuda:
                    torch.cuda.empty_cache()
                task.say(**{name: rows})


def _row(task: Task, candidate: AttentionRow, length: int, mask: str) -> dict[str, Any]:
    batch, heads, size = max(1, _TOKENS // length), _HEADS, _SIZE
    if task.tiny:
        batch, heads, size = 1, 2, 16
    dtype = torch.bfloat16 if task.cuda else torch.float32
    torch.manual_seed(0)
    # As layers make them: (batch, rows, heads, size) in memory.
    query, key, value, gradient = (
        torch.randn(batch, length, heads, size, device=task.device, dtype=dtype).transpose(1, 2)
        for _ in range(4)
    )
    inputs = tuple(one.requires_grad_() for one in (query, key, value))
    with _chosen(task, candidate, length, mask) as run:
        output = run(*inputs)

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(output, inputs, gradient, retain_graph=True)

        timer = Timer(task.device)
        forward_s = timer.median(lambda: run(*inputs), 3)
        backward_s = timer.median(backward, 3)
        repeats, equal = _repeated(
            timer, lambda: _both(run, inputs, gradient), 0.1 if task.tiny else _BITS_S
        )
    scores = length * (length + 1) / 2
    if mask == "documents":
        scores = _DOCUMENTS * (length // _DOCUMENTS) * (length // _DOCUMENTS + 1) / 2
    operations = 4.0 * batch * heads * size * scores
    return {
        "forward_tflops": operations / forward_s / 1e12,
        "backward_tflops": 2.5 * operations / backward_s / 1e12,
        "repeats": repeats,
        "equal": equal,
    }


def _both(
    run: Attention, inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    query, key, value = inputs
    output = run(query, key, value)
    return (output.detach(), *torch.autograd.grad(output, inputs, gradient))


def _repeated(
    timer: Timer, work: Callable[[], tuple[torch.Tensor, ...]], budget_s: float
) -> tuple[int, int]:
    """Returns the number of repetitions, and of repetitions with the bits of the first run."""
    first = work()
    repeats = equal = 0
    spent_s = 0.0
    results: list[tuple[torch.Tensor, ...]] = []
    while repeats < REPEATS and spent_s < budget_s:
        spent_s += timer.once(lambda: results.append(work()))
        equal += all(map(torch.equal, results.pop(), first))
        repeats += 1
    return repeats, equal


@contextmanager
def _chosen(task: Task, candidate: AttentionRow, length: int, mask: str) -> Iterator[Attention]:
    """Yields the attention of a candidate, whose choice holds inside."""
    choice = candidate.choice
    torch.use_deterministic_algorithms(candidate.deterministic)
    try:
        if choice == "flex":
            yield _flex(task, length, mask)
        elif choice == CUDNN_FLASH:
            yield _masked(attend, task, length, mask)
        elif choice == "flash3":
            if importlib.util.find_spec("flash_attn_interface") is None:
                raise ImportError("flash_attn_interface is not installed")
            implementations.activate_flash_attention_impl("FA3")
            choose_attention("flash")
            yield _masked(F.scaled_dot_product_attention, task, length, mask)
        else:
            choose_attention(choice)
            yield _masked(F.scaled_dot_product_attention, task, length, mask)
    finally:
        if choice == "flash3" and implementations.current_flash_attention_impl() is not None:
            implementations.restore_flash_attention_impl()
        choose_attention("sdpa")
        torch.use_deterministic_algorithms(True)


def _masked(function: Callable[..., torch.Tensor], task: Task, length: int, mask: str) -> Attention:
    if mask == "causal":
        return lambda query, key, value: function(query, key, value, is_causal=True)
    places = torch.arange(length, device=task.device)
    document = places // (length // _DOCUMENTS)
    seen = (document[:, None] == document) & (places[:, None] >= places)
    return lambda query, key, value: function(query, key, value, attn_mask=seen[None, None])


def _flex(task: Task, length: int, mask: str) -> Attention:
    if not task.cuda:
        raise ValueError("FlexAttention has no backward on CPUs")
    each = length // _DOCUMENTS if mask == "documents" else length

    def seen(_: Any, __: Any, row: Any, column: Any) -> Any:
        return (row >= column) & (row // each == column // each)

    blocks = create_block_mask(seen, None, None, length, length, device=task.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=blocks)
