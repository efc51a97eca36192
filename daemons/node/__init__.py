"""The supervisor of a node: prepares a run, starts the node's processes and replaces them."""
