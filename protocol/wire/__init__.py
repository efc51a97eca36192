"""penstock.protocol.wire."""
