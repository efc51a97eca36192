"""Hardware that a run uses: cores, placement of memory, peer access, bandwidths."""
