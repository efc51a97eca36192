"""The screen of ``penstock train`` and ``penstock watch``: a run on a terminal, in words."""
