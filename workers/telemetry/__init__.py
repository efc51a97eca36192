"""What a worker tells of itself: metrics, memory, progress, times, traces."""
