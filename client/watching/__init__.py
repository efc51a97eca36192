"""The commands that watch and steer a run, and what they show: status, plain lines, traces."""
