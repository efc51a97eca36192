"""observerd: a process on a run's first node that reads the files of the other processes.

It runs at the lowest priority and contacts no process of a step, so it can neither delay nor break
a step. The run continues without it.
"""
