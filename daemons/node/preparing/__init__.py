"""penstock.daemons.node.preparing."""
