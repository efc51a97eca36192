"""``penstock weights``: copies of the weights of a run that trains."""
