"""penstock.models.split_backward."""
