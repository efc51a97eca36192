"""The trace of a run compared with a simulation of its plan: text, Chrome-trace JSON, picture."""
