"""penstock.client."""
