"""The screen of ``penstock train`` and ``penstock watch`` on a terminal."""
