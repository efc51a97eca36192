"""Workers that compute on NVIDIA GPUs."""
