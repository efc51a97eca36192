"""penstock.client.training."""
