"""A limit on the memory of a script, and a model with a larger state."""

from __future__ import annotations

LIMIT = 64 << 20
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16}

LIMITED = f"""
import resource

status = Path("/proc/self/status").read_text().split("VmData:")[1]
limit = 1024 * int(status.split()[0]) + {LIMIT}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.zeros({LIMIT} // 2)  # twice as many bytes
    sys.exit("the limit holds nothing back")
except RuntimeError:
    pass
"""
"""Lines that let a script take :data:`LIMIT` bytes more, after imports of sys, Path and torch."""
