"""fetchd: reads arrays from other nodes' memory without a request to their processes (NIXL).

fetchd is its own process, started by the node, and no member of the run. It owns nothing, maps the
served memory read-only, and may die and be restarted at any time. If a peer's stale address or a
hostile packet breaks the transfer libraries, only this process is affected. See "One-sided reads"
in docs/INTERNALS.md.
"""
