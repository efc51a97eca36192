"""Views of a run: status, plain lines, terminal screen, HTML report, comparison of traces."""
