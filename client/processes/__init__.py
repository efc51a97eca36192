"""``penstock node``, and the processes that a node starts."""
