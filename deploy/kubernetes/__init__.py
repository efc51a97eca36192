"""Manifests for Kubernetes: a JobSet with one pod a node, and the same for Kubeflow Trainer."""
