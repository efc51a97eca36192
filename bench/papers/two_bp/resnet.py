"""ResNet as a type of model that Penstock can cut into blocks: ``model.imports`` names this module.

Its layers are transformers' own, one after the other instead of in four stages, and its blocks hand
on features, (micro_batch, channels, height, width), of another shape in each stage. Batches are
normalized by their own mean and variance, in evaluations too: the running ones are no parameters
that an optimizer steps, and training does not read them (docs/MODELS.md says what follows).
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, ResNetConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput
from transformers.models.resnet.modeling_resnet import (
    ResNetBottleNeckLayer,
    ResNetConvLayer,
    ResNetPreTrainedModel,
)

MODEL_TYPE = "resnet-blocks"


@strict
class ResNetBlocksConfig(ResNetConfig):  # type: ignore[no-untyped-call]
    """transformers' configuration, and what pictures are like in the token file.

    ``side``: rows and columns of a picture, of one channel; ``shown_side``: those that it is
    enlarged to. ``vocab_size``: values that a pixel can have. ``hidden_size`` and
    ``num_hidden_layers`` follow from the stages.
    """

    model_type = MODEL_TYPE
    num_channels: int = 1
    side: int = 8
    shown_side: int = 32
    vocab_size: int = 17
    num_labels: int = 10
    hidden_size: int = 0
    num_hidden_layers: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        assert self.hidden_sizes is not None and self.depths is not None
        self.hidden_size = self.hidden_sizes[-1]
        self.num_hidden_layers = sum(self.depths)


class Stem(nn.Module):
    """Pixels' values to features: (micro_batch, side * side) int64 to (micro_batch, channels,
    shown_side / 4, shown_side / 4).
    """

    def __init__(self, config: ResNetBlocksConfig) -> None:
        super().__init__()
        self.config = config
        self.embedder = ResNetConvLayer(
            config.num_channels, config.embedding_size, kernel_size=7, stride=2
        )
        self.pooler = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the features of enlarged pictures."""
        config = self.config
        values = shown(pixels, config.side, config.shown_side, config.vocab_size)
        features: torch.Tensor = self.pooler(self.embedder(values))
        return features


def shown(pixels: torch.Tensor, side: int, shown_side: int, levels: int) -> torch.Tensor:
    """Returns pictures (micro_batch, 1, shown_side, shown_side), fp32 from -1 to 1, of values from
    0 to ``levels`` - 1, (micro_batch, side * side) int64.
    """
    values = pixels.view(-1, 1, side, side).float() * (2.0 / (levels - 1)) - 1.0
    return functional.interpolate(values, size=(shown_side, shown_side), mode="nearest")


class _Blocks(ResNetPreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = ResNetBlocksConfig
    main_input_name = "input_ids"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm2d):  # it has no running mean and variance to fill
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)  # type: ignore[no-untyped-call]


class ResNetBlocks(_Blocks):  # type: ignore[no-untyped-call]
    """Stem, bottlenecks, and the mean over each picture."""

    def __init__(self, config: ResNetBlocksConfig) -> None:
        super().__init__(config)
        self.embedder = Stem(config)
        self.layers = nn.ModuleList(_bottlenecks(config))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = False
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    setattr(module, name, None)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Returns the mean of each picture's features, (micro_batch, 1, channels)."""
        hidden = self.embedder(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        if hidden.ndim == 4:  # else it stands for features where only the order of calls matters
            hidden = hidden.mean(dim=(2, 3))[:, None]
        return BaseModelOutputWithPast(last_hidden_state=hidden)


def _bottlenecks(config: ResNetBlocksConfig) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = config.embedding_size
    assert config.hidden_sizes is not None and config.depths is not None
    for stage, (width, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
        for place in range(depth):
            stride = 2 if stage and not place else 1
            layers.append(ResNetBottleNeckLayer(channels, width, stride=stride))
            channels = width
    return layers


class ResNetBlocksForClassification(_Blocks):  # type: ignore[no-untyped-call]
    """With the head that names a picture's class."""

    def __init__(self, config: ResNetBlocksConfig) -> None:
        super().__init__(config)
        self.resnet = ResNetBlocks(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Returns logits, (micro_batch, 1, classes)."""
        features = self.resnet(input_ids=input_ids, inputs_embeds=inputs_embeds)
        return CausalLMOutput(logits=self.classifier(features[0]))


AutoConfig.register(MODEL_TYPE, ResNetBlocksConfig)
AutoModelForCausalLM.register(ResNetBlocksConfig, ResNetBlocksForClassification)
