"""observerd: one process of a run, on its first node, that looks at what the others wrote.

It reads files of the run directory at the lowest priority, and talks to no process of a step: it
can neither delay nor break one. The run goes on without it.
"""
