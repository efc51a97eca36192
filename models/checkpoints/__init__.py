"""penstock.models.checkpoints."""
