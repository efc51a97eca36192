"""optimizerd: updates a node's blocks on its cores, speculatively, and takes steps back."""
