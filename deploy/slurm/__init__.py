"""The batch script that starts a run on Slurm."""
