"""UPDATE: what it waits for, what it writes and says, and the bits of its arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock import _native
from penstock.config.optimizers import OPTIMIZERS
from penstock.config.training import OptimizerConfig
from penstock.host.errors import LostMemberError
from penstock.models.step import STEPS, Piece, StepScalars, apply, sum_squares
from penstock.protocol.plan.groups import StepRange
from penstock.protocol.plan.instructions import OffloadGradients, Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.step import BlockArrays, OptimizerStep
from penstock.protocol.wire.frames import BlockUpdated, GradientReady, decode
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision
from penstock.shm.memory import NodeMemory
from penstock.workers.platforms.cuda.device import CudaDevice, gpu_of
from penstock.workers.platforms.cuda.update import CudaPreviewer
from penstock.workers.state.updates import (
    BlockUpdates,
    NativePreviewer,
    PreviewedBlock,
    Previewer,
    UpdateScope,
    cores_of,
)
from penstock.workers.waiting import Abort, Interrupted

STEP = OptimizerStep.speculative(version=1, loss_scale=8.0, learning_rate=0.01)
TIED = {"num_hidden_layers": 2, "tie_word_embeddings": True}


def with_updates(plan: Plan) -> Plan:
    """Every second block's update behind the offload of its gradients."""
    programs = []
    for program in plan.programs:
        found: list[Any] = []
        for instruction in program:
            found.append(instruction)
            if isinstance(instruction, OffloadGradients):
                blocks = plan.backward_stages[instruction.stage].blocks
                found += [Update(block=b) for b in blocks if b % 2 == 0]
        programs.append(tuple(found))
    return replace(plan, programs=tuple(programs))


@pytest.fixture
def updating(make_cluster: Any) -> Iterator[Callable[..., Any]]:
    """Clusters with UPDATE of every second block."""
    made: list[BlockUpdates] = []

    def make(**settings: Any) -> Any:
        cluster = make_cluster(hf=TIED, **settings)
        fill_state(cluster.memories[0])
        for worker in cluster.workers:
            previewer = NativePreviewer(cluster.memories[0], OptimizerConfig(), [0])
            made.append(BlockUpdates(cluster.memories[0], previewer))
            worker.context = replace(worker.context, updates=made[-1])
        cluster.adopt(with_updates(cluster.plan))
        return cluster

    yield make
    for updates in made:
        updates.close()


def fill_state(memory: NodeMemory) -> None:
    """Random master weights and moments."""
    numbers = np.random.default_rng(5)
    for block in memory.owned_blocks():
        for name in ("master", "exp_avg", "exp_avg_sq"):
            state = memory.state(block, name)
            state[:] = numbers.standard_normal(len(state), np.float32)
            if name == "exp_avg_sq":
                np.square(state, out=state)


def expected_weights(
    memory: NodeMemory, block: int, step: OptimizerStep = STEP
) -> tuple[bytes, float]:
    """What optimizerd would write and report, into memory of its own."""
    arrays = BlockArrays.of(memory, block, OptimizerConfig())
    there = aligned(np.zeros_like(arrays.weights[0]))
    with _native.Pool([0]) as pool:
        private = replace(arrays, weights=(there, there))
        status = private.preview(pool, step, OptimizerConfig())
    return there.tobytes(), status.sum_squares


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_updates_have_the_bits_of_optimizerd_and_write_no_word(
    updating: Any, dtype: str, grad_dtype: str
) -> None:
    """The embedding is tied: it gets a part of its gradients from the other device."""
    cluster = updating(model={"dtype": dtype}, grad_dtype=grad_dtype)
    cluster.train(replace(cluster.job(), step=STEP))
    memory, control = cluster.memories[0], cluster.memories[0].control
    gradients, updates = [], {}
    while cluster.optimizers[0].poll(0 if len(updates) == 2 else 5000):
        message = decode(cluster.optimizers[0].recv(), GradientReady, BlockUpdated)
        if isinstance(message, BlockUpdated):
            updates[message.block] = message
        else:
            gradients.append(message)
    assert sorted(updates) == [0, 2] and len(gradients) == len(cluster.contributions(0))
    for block, message in updates.items():
        assert (message.attempt, message.version, message.finite) == (1, 1, True)
        weights, squares = expected_weights(memory, block)
        assert memory.weights(block, 1).tobytes() == weights
        assert message.sum_squares == squares
        assert control.slot_version(block, 1) == INVALID_VERSION
        assert control.state_version(block) == 0
    assert not memory.weights(1, 1).any(), "the other blocks are the CPU's"


def test_an_attempt_that_holds_updates_nothing(updating: Any) -> None:
    cluster = updating()
    job = cluster.job()
    cluster.train(job)
    cluster.check_finished(job)
    assert not any(cluster.memories[0].weights(block, 1).any() for block in (0, 2))


@dataclass
class Site:
    """Updates over a memory without anybody else."""

    memory: NodeMemory
    updates: BlockUpdates
    done: list[tuple[int, PreviewedBlock]]
    abort: Abort

    def scope(self, timeout_s: float = 20.0) -> UpdateScope:
        return UpdateScope(
            epoch=1,
            attempt=1,
            step=STEP,
            abort=self.abort,
            timeout_s=timeout_s,
            done=lambda block, done: self.done.append((block, done)),
        )

    def publish(self, block: int) -> None:
        for k in range(self.memory.spec.layout.contributions[block]):
            self.memory.control.set_ready(block, k, epoch=1, attempt=1)


@pytest.fixture
def site(make_cluster: Any) -> Iterator[Site]:
    memory = make_cluster(hf=TIED, workers=1).memories[0]
    updates = BlockUpdates(memory, NativePreviewer(memory, OptimizerConfig(), [0]))
    yield Site(memory, updates, [], Abort())
    updates.close()


def test_a_block_waits_for_its_settle_its_slot_and_all_its_gradients(site: Site) -> None:
    control = site.memory.control
    control.set_state_version(0, 7)
    control.set_slot_version(0, 1, 3)
    for clear, awaited in (
        (lambda: control.set_state_version(0, 0), r"settle block 0 at version 0 .*is at 7"),
        (lambda: control.set_slot_version(0, 1, INVALID_VERSION), r"slot 1 \(it holds version 3"),
        (lambda: control.set_ready(0, 0, epoch=1, attempt=1), r"partials \[0, 1\] are not"),
        (lambda: control.set_ready(0, 1, epoch=1, attempt=1), r"block 0 in attempt 1:.* \[1\] are"),
    ):
        site.updates.start(0, site.scope(timeout_s=0.02))
        with pytest.raises(LostMemberError, match=rf"^waited 0.02 s for .*{awaited}"):
            site.updates.finish(site.abort)
        site.updates.drop()
        clear()
    site.updates.start(0, site.scope())
    site.updates.finish(site.abort)
    assert [block for block, _ in site.done] == [0]


def test_the_deadline_of_a_settle_starts_when_a_save_has_read_the_block(site: Site) -> None:
    control = site.memory.control
    control.set_state_version(0, 7)
    control.set_pin(0, 0)
    site.publish(0)

    def settle() -> None:
        control.set_state_version(0, 0)
        control.set_pin(0, None)

    timer = threading.Timer(0.5, settle)
    timer.start()
    site.updates.start(0, site.scope(timeout_s=0.02))
    site.updates.finish(site.abort)
    timer.join()
    assert [block for block, _ in site.done] == [0]


def test_an_abort_ends_all_updates_and_nothing_is_written_after_it(site: Site) -> None:
    for block in (2, 1):
        site.publish(block)
    for block in (0, 1, 2):  # block 0 has no gradients, and the others wait behind it
        site.updates.start(block, site.scope())
    assert site.updates.under_way == [0, 1, 2]
    timer = threading.Timer(0.05, site.abort.set, ["drained"])
    timer.start()
    with pytest.raises(Interrupted, match="drained"):
        site.updates.finish(site.abort)
    timer.join()
    site.updates.drop()
    site.publish(0)
    assert site.done == [] and site.updates.under_way == []
    assert not any(site.memory.weights(block, 1).any() for block in (0, 1, 2))


def test_threads_of_workers_get_cores_of_their_own_as_far_as_there_are() -> None:
    cores = [2, 3, 5, 7]
    assert [cores_of(worker, 2, cores) for worker in range(3)] == [[2, 3], [5, 7], [2, 3]]
    assert cores_of(1, 8, cores) == cores
    assert cores_of(1, 3, cores) == [7, 2, 3]


# ---- residents ----


def scope_of(step: OptimizerStep, attempt: int = 1) -> UpdateScope:
    """For a previewer without threads around it."""
    return UpdateScope(
        epoch=1,
        attempt=attempt,
        step=step,
        abort=Abort(),
        timeout_s=20.0,
        done=lambda block, done: None,
    )


class Home:
    """Block 0 in host memory, where optimizerd takes commits in."""

    def __init__(self, memory: NodeMemory, previewer: Previewer) -> None:
        self.memory = memory
        self.previewer = previewer
        self._numbers = np.random.default_rng(7)
        self.state = [memory.state(0, name) for name in ("master", "exp_avg", "exp_avg_sq")]
        fill_state(memory)

    def preview(self, version: int, attempt: int, *, reads_state: bool) -> None:
        """New gradients, and the weights that they lead to. Unless ``reads_state``, what is in host
        memory is spoiled meanwhile.
        """
        step = replace(STEP, version=version, bias_step=version)
        for k in range(self.memory.spec.layout.contributions[0]):
            grads = self.memory.grads(0, version % 2, k)
            grads[:] = self._numbers.standard_normal(len(grads), np.float32)
        weights, _ = expected_weights(self.memory, 0, step)
        truth = [array.copy() for array in self.state]
        if not reads_state:
            for array in self.state:
                array.fill(np.nan)
        self.previewer.preview(0, scope_of(step, attempt))
        for array, values in zip(self.state, truth, strict=True):
            array[:] = values
        assert self.memory.weights(0, version % 2).tobytes() == weights

    def commit(self, version: int, attempt: int, coefficient: float) -> None:
        """Journaled, and settled."""
        record = CommitRecord(
            version=version,
            attempt=attempt,
            decision=Decision.COMMIT if coefficient == 1.0 else Decision.AMEND,
            coefficient=coefficient,
            inverse_loss_scale=0.125,
            learning_rate=0.02,
            bias_step=version,
            incarnation=1,
        )
        self.memory.control.write_record(record)
        arrays = BlockArrays.of(self.memory, 0, OptimizerConfig())
        with _native.Pool([0]) as pool:
            _native.settle(
                pool,
                **arrays.state(version - 1),
                grads=arrays.gradients(version),
                hyper=OptimizerStep.of(record).hyper(OptimizerConfig()),
                ranges=arrays.ranges,
                undo=aligned(np.zeros(_native.undo_bytes(1), np.uint8)),
            )


def check_residents(home: Home) -> None:
    """All that may happen between two updates of an epoch."""
    home.preview(1, attempt=1, reads_state=True)
    home.commit(1, attempt=1, coefficient=0.25)
    home.preview(2, attempt=2, reads_state=False)
    # Attempt 2 is skipped.
    home.preview(2, attempt=3, reads_state=False)
    home.commit(2, attempt=3, coefficient=1.0)
    home.preview(3, attempt=4, reads_state=False)
    # Attempt 4 is skipped, 5 held: version 3 has gradients that the device never saw.
    home.commit(3, attempt=5, coefficient=1.0)
    home.preview(4, attempt=6, reads_state=True)
    home.commit(4, attempt=6, coefficient=1.0)
    # Another attempt that held.
    home.commit(5, attempt=7, coefficient=1.0)
    home.preview(6, attempt=8, reads_state=True)
    home.commit(6, attempt=8, coefficient=0.5)
    home.preview(7, attempt=9, reads_state=False)


def test_residents_take_commits_in_by_themselves(make_cluster: Any) -> None:
    """With the bits of optimizerd; state is read only where the copy cannot be brought up."""
    memory = make_cluster(hf=TIED, workers=1).memories[0]
    previewer = NativePreviewer(memory, OptimizerConfig(), [0], residents=[0])
    check_residents(Home(memory, previewer))
    previewer.close()


def test_a_resident_takes_a_commit_in_once_though_its_update_broke_off(make_cluster: Any) -> None:
    memory = make_cluster(hf=TIED, workers=1).memories[0]
    previewer = NativePreviewer(memory, OptimizerConfig(), [0], residents=[0])
    home = Home(memory, previewer)
    home.preview(1, attempt=1, reads_state=True)
    home.commit(1, attempt=1, coefficient=1.0)
    impossible = replace(STEP, version=2, bias_step=0)
    with pytest.raises(ValueError, match="step"):
        previewer.preview(0, scope_of(impossible, attempt=2))
    home.preview(2, attempt=3, reads_state=False)
    previewer.close()


# ---- flushed blocks ----

FLUSHED = {"passes": ["interleave-updates"], "update_stride": 1, "device_updates": "flush"}
"""A schedule whose devices flush all blocks."""


def check_flushes(memory: NodeMemory, previewer: Previewer) -> None:
    """Of block 0: three attempts, of which the first does not count. State and weights have
    optimizerd's bits, and the committed copy is left alone.
    """
    fill_state(memory)
    numbers = np.random.default_rng(3)
    for version, attempt in ((1, 1), (1, 2), (2, 3)):
        step = replace(STEP, version=version, bias_step=version)
        for k in range(memory.spec.layout.contributions[0]):
            grads = memory.grads(0, version % 2, k)
            grads[:] = numbers.standard_normal(len(grads), np.float32)
        arrays = BlockArrays.of(memory, 0, OptimizerConfig())
        before = [array.tobytes() for array in arrays.copy_of(version - 1).all]
        weights, _ = expected_weights(memory, 0, step)
        state = expected_state(arrays, step)
        previewer.preview(0, scope_of(step, attempt))
        assert memory.weights(0, version % 2).tobytes() == weights
        assert [array.tobytes() for array in arrays.copy_of(version).all] == state
        assert [array.tobytes() for array in arrays.copy_of(version - 1).all] == before


def expected_state(arrays: BlockArrays, step: OptimizerStep) -> list[bytes]:
    """What optimizerd would settle, in memory of its own."""
    master, *others = (aligned(array) for array in arrays.copy_of(step.version - 1).all)
    with _native.Pool([0]) as pool:
        _native.settle(
            pool,
            master=master,
            arrays=others,
            grads=arrays.gradients(step.version),
            hyper=step.hyper(OptimizerConfig()),
            ranges=arrays.ranges,
            undo=aligned(np.zeros(_native.undo_bytes(1), np.uint8)),
        )
    return [array.tobytes() for array in (master, *others)]


def test_a_flush_writes_the_next_state_beside_the_committed_one(make_cluster: Any) -> None:
    cluster = make_cluster(hf=TIED, workers=1, schedule=FLUSHED)
    memory = cluster.memories[0]
    assert cluster.plan.flushed == tuple(range(cluster.plan.num_blocks))
    previewer = NativePreviewer(memory, OptimizerConfig(), [0], flushed=cluster.plan.flushed)
    check_flushes(memory, previewer)
    previewer.close()


# ---- the arithmetic for devices other than the CPU ----

COUNT = 3 * 4096 + 48
RANGES = [StepRange(0, 4112, 0.1), StepRange(4112, 8192, 0.0, 0.3), StepRange(8192, COUNT, 0.1)]


def aligned(values: Any) -> Any:
    """A copy that starts at a multiple of 64 bytes."""
    raw = np.zeros(values.nbytes + 64, np.uint8)
    there = raw[-raw.ctypes.data % 64 :][: values.nbytes].view(values.dtype)
    there[:] = values
    return there


def test_gpus_have_a_step_for_the_optimizers_that_the_table_says() -> None:
    assert set(STEPS) == {name for name, traits in OPTIMIZERS.items() if traits.on_gpus}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("version", [1, 7, 1000])
def test_tensor_operations_have_the_bits_of_the_native_kernel(
    name: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, whose square root is correctly rounded; that of torch on CPUs is not."""
    rounded = lambda tensor: tensor.copy_(tensor.double().sqrt())  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "sqrt_", rounded)
    config = OptimizerConfig.model_validate({"name": name})
    step = OptimizerStep.speculative(version=version, loss_scale=1024.0, learning_rate=3e-4)
    numbers = np.random.default_rng(version)
    normal = lambda: aligned(numbers.standard_normal(COUNT, np.float32))  # noqa: E731
    state = {"master": normal(), "exp_avg": normal(), "exp_avg_sq": normal()}
    np.square(state["exp_avg_sq"], out=state["exp_avg_sq"])
    grads = [normal() * np.float32(2000.0), normal()]
    weights = aligned(np.zeros(COUNT, np.float32))
    shared: dict[str, Any] = {
        "grads": [aligned(g) for g in grads],
        "hyper": step.hyper(config),
        "ranges": RANGES,
        "master": state["master"],
        "arrays": [state["exp_avg"], state["exp_avg_sq"]],
    }
    total = torch.from_numpy(grads[0] + grads[1])
    squares = float(sum_squares(total, torch.empty(COUNT, dtype=torch.float64)))
    piece = Piece(
        **{key: torch.from_numpy(array.copy()) for key, array in state.items()},
        gradients=total,
        scratch=torch.empty(COUNT),
        ranges=RANGES,
    )
    with _native.Pool([0]) as pool:
        dtype = _native.WeightsDtype.FLOAT32
        status = _native.preview(pool, weights=weights, weights_dtype=dtype, **shared)
        _native.settle(pool, undo=aligned(np.zeros(_native.undo_bytes(1), np.uint8)), **shared)
    assert apply(piece, StepScalars.of(step, config)).numpy().tobytes() == weights.tobytes()
    for name, array in state.items():
        assert getattr(piece, name).numpy().tobytes() == array.tobytes(), name
    assert squares == pytest.approx(status.sum_squares, rel=1e-13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "grad_dtype"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_a_gpu_updates_with_the_bits_of_the_native_kernel(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, grad_dtype: str
) -> None:
    """In pieces that do not divide the block; block 0 has two contributions."""
    monkeypatch.setattr("penstock.workers.platforms.cuda.update.PIECE_ELEMENTS", 1024)
    cluster = make_cluster(hf=TIED, workers=1, model={"dtype": dtype}, grad_dtype=grad_dtype)
    memory, table = cluster.memories[0], cluster.table
    fill_state(memory)
    job = cluster.job()
    cluster.train(job)
    gpu = gpu_of(0)
    device = CudaDevice(gpu, weight_dtype=table.weight_dtype, grad_dtype=table.grad_dtype)
    device.attach(memory, 1 << 20, 1)
    previewer = CudaPreviewer(gpu, memory, OptimizerConfig(), [0, 1])
    for block in (0, 1, 0):
        done = previewer.preview(block, scope_of(STEP))
        weights, squares = expected_weights(memory, block)
        assert memory.weights(block, 1).tobytes() == weights
        assert done.status.finite and done.status.sum_squares == pytest.approx(squares, rel=1e-13)
    previewer.close()
    if dtype == "fp32":
        previewer = CudaPreviewer(gpu, memory, OptimizerConfig(), [0], residents=[0])
        check_residents(Home(memory, previewer))
        previewer.close()
    device.detach()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_flushes_with_the_bits_of_the_native_kernel(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that do not divide the block."""
    monkeypatch.setattr("penstock.workers.platforms.cuda.update.PIECE_ELEMENTS", 1024)
    cluster = make_cluster(hf=TIED, workers=1, schedule=FLUSHED)
    memory, table = cluster.memories[0], cluster.table
    gpu = gpu_of(0)
    device = CudaDevice(gpu, weight_dtype=table.weight_dtype, grad_dtype=table.grad_dtype)
    device.attach(memory, 1 << 20, 1)
    previewer = CudaPreviewer(gpu, memory, OptimizerConfig(), [0], flushed=[0])
    check_flushes(memory, previewer)
    previewer.close()
    device.detach()
