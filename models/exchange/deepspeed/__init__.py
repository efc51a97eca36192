"""Checkpoints of DeepSpeed: universal ones in and out, and directories of ZeRO in."""
