"""Claims on a machine: all or nothing, and gone with their process."""

from __future__ import annotations

import subprocess
import sys

from penstock.host.core_locks import Claim

HOLDER = """
import sys, time
from penstock.host.core_locks import Claim
held = Claim.of(sys.argv[1:])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_name_is_one_process_s_until_its_end() -> None:
    names = ("test-3", "test-4")
    command = [sys.executable, "-c", HOLDER, *names]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert Claim.of(("test-5", "test-4")) is None
        with Claim.of(("test-5",)) or Claim(()) as free:
            assert Claim.of(("test-5",)) is None, "not held by the refused claim, but by this one"
            free.release()
        holder.kill()
        holder.wait()
        again = Claim.of(names)
        assert again is not None
        again.release()
