"""``python -m bench.papers.mario [rates] [parameters] [sequences] [tuner]``."""

import sys

from bench.papers.mario.recording import record

if __name__ == "__main__":
    record(tuple(sys.argv[1:]))
