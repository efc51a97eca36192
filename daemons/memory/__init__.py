"""memoryd: owns a node's shared memory, serves its blocks, saves and restores them."""
