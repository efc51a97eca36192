"""Units for systemd: one service a node, one target for the nodes of a run on a machine."""
