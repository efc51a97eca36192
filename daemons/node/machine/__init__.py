"""penstock.daemons.node.machine."""
