"""penstock.models.profiling."""
