"""``penstock report``: one page of HTML about a run, or about two side by side.

A page needs nothing beside itself: no network, no scripts, pictures are inline SVG. What it says
comes from the files of the run directory alone, so that it can be made while the run goes on, or
years later.
"""
