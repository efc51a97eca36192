"""Three of the faults of ``python -m tests.integration.diagnosis``, and a run without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.diagnosis.diagnosing import clean, diagnose
from tests.integration.diagnosis.faults import FAULTS
from tests.integration.diagnosis.watching import OF_THE_MACHINE, Watch
from tests.integration.prometheus import missing

NEEDED = ("prometheus", "prometheus-alertmanager", "setpriv", "unshare", "mount")
TRIED = ("worker-killed", "disk-full", "state-unwritable")

pytestmark = [
    pytest.mark.skipif(missing(*NEEDED) != "", reason=missing(*NEEDED)),
    pytest.mark.integration,
]


def test_people_hear_of_each_fault_and_of_nothing_else(tmp_path: Path) -> None:
    faults = [fault for fault in FAULTS if fault.name in TRIED]
    with Watch(tmp_path) as watch, ThreadPoolExecutor() as pool:
        undisturbed = pool.submit(clean, watch, tmp_path, 1.0)
        findings = list(pool.map(lambda fault: diagnose(fault, watch, tmp_path), faults))
        told = [message for message in undisturbed.result() if message.alert not in OF_THE_MACHINE]
    assert not told
    assert len(findings) == len(TRIED)
    for finding in findings:  # in time or not: that is for a quiet machine
        others = OF_THE_MACHINE - {finding.fault.alert}
        assert set(finding.told) - others == {finding.fault.alert}, finding
