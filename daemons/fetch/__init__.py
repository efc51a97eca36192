"""fetchd: reads arrays out of other nodes' memory, without asking anybody there (NIXL).

A process of its own, started by the node beside the run's members and none of them: it owns
nothing, maps what it serves read-only, and may die and be started again at any time. Whatever a
peer's stale address or a hostile packet does to the libraries that move the bytes, it does to this
process alone. See "One-sided reads" in docs/INTERNALS.md.
"""
