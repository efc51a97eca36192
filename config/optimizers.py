"""The optimizers: their state, and their hyper-parameters.

A row is all that Python knows about an optimizer. From a row follow:

* the values of ``optimizer.name`` and the reference page of its keys
  (:mod:`penstock.config.training`);

* the arrays of the model's state (:mod:`penstock.shm.table`), and so the memory, the saved form and
  the restore;

* the bytes that its sweeps move (:mod:`penstock.planner.cost.cluster`) and that a node holds
  (:mod:`penstock.planner.planning.plan_search`);

* the arguments of the kernels (:mod:`penstock.protocol.plan.step`).

The arithmetic is elsewhere: a step of the same name in ``native/steps.h``, and, where GPUs execute
UPDATE, an entry of ``STEPS`` in :mod:`penstock.models.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class OptimizerName(StrEnum):
    """Values of ``optimizer.name``."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    ADAGRAD = "adagrad"

    @property
    def traits(self) -> OptimizerTraits:
        """The optimizer's row of :data:`OPTIMIZERS`."""
        return OPTIMIZERS[self]


class Hyperparameter(StrEnum):
    """Keys of the section ``optimizer`` that only some optimizers have. All optimizers have ``lr``
    and ``weight_decay``. The descriptions of the keys explain them.
    """

    BETAS = "betas"
    MOMENTUM = "momentum"
    """The kernels' beta1."""
    EPS = "eps"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTraits:
    """One optimizer.

    ``label`` is its name in texts, ``source`` names the origin of its step. ``state_arrays``:
    arrays in addition to the master weights, by torch's names, each with one fp32 number a
    parameter. ``decouples_decay``: weight decay multiplies the weights (by 1 - lr * weight_decay);
    otherwise it is added to the gradient. ``corrects_bias``: moments are corrected for their start
    at zero. ``on_gpus``: GPUs execute its UPDATE; CPUs and emulated devices execute UPDATE for all
    optimizers.
    """

    label: str
    source: str
    state_arrays: tuple[str, ...]
    hyperparameters: tuple[Hyperparameter, ...]
    decouples_decay: bool = False
    corrects_bias: bool = False
    on_gpus: bool = False

    @property
    def state_bytes(self) -> float:
        """Bytes of the state arrays, for each parameter."""
        return 4.0 * len(self.state_arrays)

    @property
    def stepped_bytes(self) -> float:
        """Bytes that a step reads in addition to gradients, for each parameter: fp32 master and
        state.
        """
        return 4.0 + self.state_bytes


OPTIMIZERS: Mapping[OptimizerName, OptimizerTraits] = MappingProxyType(
    {
        OptimizerName.ADAMW: OptimizerTraits(
            label="AdamW",
            source='Loshchilov & Hutter, "Decoupled Weight Decay Regularization", algorithm 2',
            state_arrays=("exp_avg", "exp_avg_sq"),
            hyperparameters=(Hyperparameter.BETAS, Hyperparameter.EPS),
            decouples_decay=True,
            corrects_bias=True,
            on_gpus=True,
        ),
        OptimizerName.ADAM: OptimizerTraits(
            label="Adam",
            source='Kingma & Ba, "Adam", algorithm 1',
            state_arrays=("exp_avg", "exp_avg_sq"),
            hyperparameters=(Hyperparameter.BETAS, Hyperparameter.EPS),
            corrects_bias=True,
            on_gpus=True,
        ),
        OptimizerName.SGD: OptimizerTraits(
            label="SGD",
            source="torch.optim.SGD with momentum, without dampening or Nesterov momentum",
            state_arrays=("momentum_buffer",),
            hyperparameters=(Hyperparameter.MOMENTUM,),
        ),
        OptimizerName.LION: OptimizerTraits(
            label="Lion",
            source='Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2',
            state_arrays=("exp_avg",),
            hyperparameters=(Hyperparameter.BETAS,),
            decouples_decay=True,
        ),
        OptimizerName.ADAGRAD: OptimizerTraits(
            label="Adagrad",
            source="torch.optim.Adagrad without decay of the learning rate",
            state_arrays=("sum",),
            hyperparameters=(Hyperparameter.EPS,),
        ),
    }
)


def labels_with(key: Hyperparameter) -> str:
    """Returns the optimizers that have a hyper-parameter, as a text: "Adam, AdamW and Lion"."""
    return _listed([row.label for row in OPTIMIZERS.values() if key in row.hyperparameters])


def names_that_decouple() -> str:
    """Returns the optimizers that decouple weight decay from the gradient, as configurations name
    them.
    """
    return _listed([name.value for name, row in OPTIMIZERS.items() if row.decouples_decay])


def names_on_gpus() -> str:
    """Returns the optimizers with an UPDATE on GPUs, as configurations name them."""
    return _listed([name.value for name, row in OPTIMIZERS.items() if row.on_gpus])


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
