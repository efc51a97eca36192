"""What Mario's text prints of its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TABLE_5: Mapping[tuple[str, str], tuple[tuple[float, float, float], ...]] = MappingProxyType(
    {
        ("mario-gpt3-13b", "V"): (
            (10.35, 122.41, 20.42),
            (9.85, 14.10, 14.13),
            (9.85, 14.10, 17.68),
            (12.29, 16.61, 18.37),
        ),
        ("mario-gpt3-13b", "X"): (
            (71.90, 124.27, 23.19),
            (19.53, 27.61, 19.13),
            (19.53, 27.61, 22.24),
            (19.78, 28.59, 23.40),
        ),
        ("mario-gpt3-13b", "W"): (
            (65.27, 178.97, 22.23),
            (9.77, 13.62, 13.81),
            (9.77, 13.62, 14.10),
            (9.87, 14.11, 21.48),
        ),
        ("mario-llama2-13b", "V"): (
            (8.17, 35.85, 25.11),
            (7.90, 11.37, 21.80),
            (7.90, 11.37, 24.78),
            (8.06, 12.06, 26.55),
        ),
        ("mario-llama2-13b", "X"): (
            (30.06, 44.34, 28.76),
            (15.67, 22.58, 24.46),
            (15.67, 22.58, 27.90),
            (15.86, 23.27, 29.48),
        ),
        ("mario-llama2-13b", "W"): (
            (13.60, 29.74, 17.83),
            (7.85, 11.89, 16.21),
            (7.85, 11.89, 17.16),
            (7.94, 11.92, 26.95),
        ),
    }
)
"""Of base, ckpt, ovlp and lmbs: least and most GB of a device, samples/s. Underlined there, since
estimated by its simulator (out of memory): base of GPT3-13B, and X-base of LLaMA2-13B.
"""

ESTIMATED = frozenset(
    {
        *(("mario-gpt3-13b", shape, "base") for shape in "VXW"),
        ("mario-llama2-13b", "X", "base"),
    }
)

FIGURE_6: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("mario-gpt3-1.6b", "V"): 1.16,
        ("mario-llama2-3b", "V"): 1.00,
        ("mario-gpt3-1.6b", "X"): 1.23,
        ("mario-llama2-3b", "X"): 1.17,
        ("mario-gpt3-1.6b", "W"): 1.52,
        ("mario-llama2-3b", "W"): 1.40,
    }
)
"""lmbs over base on 8 GPUs (section 6.1). Which of the two models of a shape comes first is not
said; GPT3 does in the figure's title.
"""

FIGURE_8: Mapping[str, tuple[str, float]] = MappingProxyType(
    {"V": ("3B, 16B", 5.3), "X": ("-, 7B", 2.3), "W": ("-", 20.0)}
)
"""Largest models of base and of ovlp, and their ratio (section 6.4)."""
