"""The same training as Penstock's, as others do it: same tokens, micro-batches, AdamW, clipping.

Each loop yields after every step; :func:`timed` counts. Losses of all are over tokens and in fp32;
layers are recomputed in the backward.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu.running import SkippedError, Task
from bench.gpu.shapes import Shape

Step = Callable[[list[tuple[torch.Tensor, torch.Tensor]]], float]
"""Takes the (input ids, labels) of a step's micro-batches, on the device; returns the mean loss."""

CLIP = 100.0
LEARNING_RATE = 1e-4
_BETAS, _DECAY = (0.9, 0.95), 0.1
_END_S = 8.0
"""No step begins that may not end before the deadline by so much."""


def compute_dtype(task: Task) -> torch.dtype:
    """Returns bf16, or fp32 on CPUs, where bf16 is slow."""
    return torch.bfloat16 if task.cuda else torch.float32


def model_of(task: Task, one: Shape, dtype: torch.dtype) -> Any:
    """Returns a new model on the device, which recomputes its layers."""
    config = LlamaConfig(**one.hf)
    with torch.device(task.device):
        model: Any = LlamaForCausalLM(config)
    model.to(dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def micro_batches(
    task: Task, one: Shape, steps: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yields the micro-batches of each step; labels are the next tokens."""
    tokens = torch.from_numpy(one.tokens(steps).astype("int64"))
    for step in tokens.view(steps, -1, one.micro_batch, one.sequence):
        yield [
            (part.to(task.device), torch.roll(part, -1, dims=1).to(task.device)) for part in step
        ]


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the losses of all tokens, in fp32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def timed(task: Task, one: Shape, step: Step, *, steps: int, warmup_steps: int = 1) -> None:
    """Takes steps, and reports tokens/s after each."""
    cuda, took_s, losses = task.cuda, 0.0, []
    for number, batches in enumerate(micro_batches(task, one, steps + warmup_steps)):
        if number == warmup_steps and cuda:
            torch.cuda.reset_peak_memory_stats()
        started_s = time.perf_counter()
        losses.append(round(step(batches), 4))  # a number on the host: the step is over
        last_s = time.perf_counter() - started_s
        if number >= warmup_steps:
            took_s += last_s
            counted = number + 1 - warmup_steps
            rate = counted * one.step_tokens / took_s
            task.say(
                tokens_per_s=rate,
                step_s=took_s / counted,
                steps=counted,
                losses=losses[warmup_steps:],
                model_tflops=rate * one.model_flops / 1e12,
                recompute_tflops=rate * one.recompute_flops / 1e12,
                parameters=one.parameters,
                device_bytes=torch.cuda.max_memory_allocated() if cuda else None,
            )
        if task.left_s < last_s + _END_S:
            break


def plain(task: Task, one: Shape, *, compiled: bool = False) -> Step:
    """Returns a step with all state on the device: bf16 weights, fp32 sums of gradients, fp32
    masters and AdamW, fused. ``compiled``: layers go through torch.compile, with the attention
    that torch prefers (cuDNN on Hopper).
    """
    model = model_of(task, one, compute_dtype(task))
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    for weight, master in zip(weights, masters, strict=True):
        master.grad = torch.zeros_like(master)
        weight.register_post_accumulate_grad_hook(_adder(master.grad))
    optimizer = torch.optim.AdamW(
        masters, lr=LEARNING_RATE, betas=_BETAS, weight_decay=_DECAY, fused=True
    )

    def step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        tokens = sum(ids.numel() for ids, _ in batches)
        total = torch.zeros((), device=task.device)
        for ids, labels in batches:
            loss = loss_sum(model(input_ids=ids, use_cache=False).logits, labels) / tokens
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([weight.data for weight in weights], masters)
            torch._foreach_zero_([master.grad for master in masters])
        return float(total)

    return step


def _adder(total: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        total.add_(weight.grad)
        weight.grad = None

    return add


def fsdp(task: Task, one: Shape, *, once: bool) -> Step:
    """Returns a step of FSDP2 with CPU offload.

    Layers are sharded one by one. Masters in fp32 are in pinned host memory, AdamW is fused on the
    CPU. ``once``: gradients stay on the device until the last micro-batch.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if task.cuda else "gloo"
    place = f"file://{task.folder / 'store'}"
    distributed.init_process_group(backend, init_method=place, rank=0, world_size=1)
    model = model_of(task, one, torch.float32)
    how: dict[str, Any] = {
        "mesh": init_device_mesh(task.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(compute_dtype(task), reduce_dtype=torch.float32),
    }
    if task.cuda:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    if task.cuda:
        torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=_BETAS, weight_decay=_DECAY, fused=True
    )

    def step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        tokens = sum(ids.numel() for ids, _ in batches)
        total = torch.zeros((), device=task.device)
        for number, (ids, labels) in enumerate(batches, 1):
            if once:
                model.set_requires_gradient_sync(number == len(batches))
            loss = loss_sum(model(input_ids=ids, use_cache=False).logits, labels) / tokens
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def deepspeed(task: Task, one: Shape, *, stage: int) -> Step:
    """Returns a step of ZeRO. Pinned host memory has the optimizer, and with stage 3 the
    parameters.
    """
    try:
        import deepspeed as library
    except ImportError as error:
        raise SkippedError(f"DeepSpeed does not import here: {error}") from error
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    host: dict[str, Any] = {"device": "cpu", "pin_memory": task.cuda}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": host, "overlap_comm": True}
    if stage == 3:
        zero["offload_param"] = host
    adamw = {"lr": LEARNING_RATE, "betas": list(_BETAS), "weight_decay": _DECAY}
    config = {
        "train_micro_batch_size_per_gpu": one.micro_batch,
        "gradient_accumulation_steps": one.global_batch // one.micro_batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": zero,
    }
    library.init_distributed("nccl" if task.cuda else "gloo", auto_mpi_discovery=False)
    model = model_of(task, one, torch.bfloat16)
    engine, *_ = library.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        total = torch.zeros((), device=task.device)
        for ids, labels in batches:
            logits = engine(input_ids=ids, use_cache=False).logits
            loss = loss_sum(logits, labels) / ids.numel()
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()
            total += loss.detach() / len(batches)
        return float(total)

    return step


def roundpipe(task: Task, one: Shape, *, stale: bool) -> Step:
    """Returns a step of RoundPipe: weights in host memory, AdamW on the CPU; ``stale``:
    asynchronous, so that a step computes with weights that are one step old, as it does by
    default.
    """
    task.need_gpu()
    try:
        import roundpipe as library
    except ImportError as error:
        raise SkippedError(f"RoundPipe does not import here: {error}") from error
    count = one.global_batch // one.micro_batch
    model = library.wrap_model_to_roundpipe(
        model_of(task, one, torch.bfloat16).to("cpu"),
        use_sequential_preset=True,
        optim_dtype=torch.float32,
        pin_model="register",
        model_run_config=library.RoundPipeRunConfig(num_microbatch=count),
    )
    optimizer = library.optim.Adam(
        model.optim_parameters(),
        lr=LEARNING_RATE,
        betas=_BETAS,
        weight_decay=_DECAY,
        decoupled_weight_decay=True,
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(list(model.optim_parameters()), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        ids = torch.cat([ids for ids, _ in batches]).to("cpu")
        inputs = {"input_ids": ids, "labels": ids, "return_logits": False}
        loss = model.forward_backward(
            input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.loss / count
        )
        model.step(update, is_async=stale)
        return float(loss)

    return step
