"""The processes that compute: one for each device, which runs its program attempt by attempt."""
