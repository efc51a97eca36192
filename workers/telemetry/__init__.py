"""A worker's observability: metrics, memory, progress, times, traces."""
