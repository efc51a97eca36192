"""mirrord keeps the state of another node's blocks, and steps it along (``memory.mirror``).

It pulls the gradients of each attempt, says when it has them (no commit is journaled before), and
settles its replica with the commit's record, by the native sweeps that the owner uses: the bits are
equal. What it has no state of it reads from the owner, block by block, while training goes on. A
replica is never the truth: what does not fit the journal is dropped and read anew.
"""
