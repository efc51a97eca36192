"""schedulerd: one per job; owns the journal and decides, attempt by attempt, what counts.

``state`` decides (with ``membership``, ``barrier``, ``transaction``, ``interludes``, ``agenda`` and
``mirror``; ``events`` is its vocabulary), ``service`` listens, ``effects`` acts (with ``journal``,
``saved`` and ``metrics_file``), ``main`` wires.
"""
