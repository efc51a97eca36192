"""penstock.protocol.platforms."""
