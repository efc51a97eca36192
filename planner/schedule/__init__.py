"""Layout of stages, lowering to instructions, replicas, and times of orders."""
