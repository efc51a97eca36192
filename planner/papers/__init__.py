"""The papers' numbers beside ours, computed anew: one module per paper, ``python -m
penstock.planner.papers`` for the page in ``docs/``.
"""
