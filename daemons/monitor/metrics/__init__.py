"""metricsd: the one process of a node that Prometheus talks to.

It scrapes the processes of the node (``scrape``), and labels and merges their samples
(``exposition``). It adds measurements of the processes and of the node, and serves the result over
HTTP (``exporter``). Files name its addresses (``targets``). metricsd is no member of the run: the
run continues without it, and only metricsd pays for a scrape.
"""
