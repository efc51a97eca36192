"""``penstock report``: one page of HTML about a run, or about two side by side.

A page is one file: it needs no network and no scripts, and its pictures are inline SVG. All content
comes from files of the run directory. The page can be written while the run trains, or years later.
"""
