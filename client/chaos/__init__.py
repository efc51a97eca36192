"""``penstock chaos``: a run whose processes, connections and disks fail again and again."""
