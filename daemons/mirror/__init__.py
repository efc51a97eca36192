"""mirrord keeps a replica of another node's block state, and applies each step to it
(``memory.mirror``).

It pulls the gradients of each attempt and reports when it has them; no commit is journaled before.
It settles the replica with the commit's record, by the same native sweeps as the owner, so the bits
are equal. Missing state is read from the owner, block by block, while training continues. A replica
is never the truth: state that does not fit the journal is dropped and read again.
"""
