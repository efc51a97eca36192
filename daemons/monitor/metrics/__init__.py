"""metricsd: the one process of a node that Prometheus talks to.

It asks the node's processes for their pages (``asking``), says of every sample whose it is
(``merging``), adds what it sees of processes and of the node itself, and serves the whole over HTTP
(``exporter``). Where it listens is told by files (``targets``). It is no member of the run, which
goes on without it; whatever a scrape costs, it costs this process.
"""
