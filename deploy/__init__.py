"""What starts Penstock on the engines that clusters already have: Slurm, systemd, Kubernetes.

Each folder holds the files of one engine as templates, and the module that fills them in.
"""
