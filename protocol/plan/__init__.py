"""penstock.protocol.plan."""
