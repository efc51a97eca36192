"""The papers' numbers beside ours, computed anew: one module per paper, ``python -m
bench.papers`` for the page in ``docs/``.
"""
