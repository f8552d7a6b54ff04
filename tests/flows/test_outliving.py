"""A train run goes on when its worker, which reads what it prints, has died."""

import os
import subprocess
import sys

import pytest

LOGS = """
import sys
{call}
from prefect.logging.handlers import PrefectConsoleHandler
import logging
log = logging.getLogger("told")
log.addHandler(PrefectConsoleHandler(stream=sys.stderr))
for _ in range(3):
    log.warning("a rank has failed")
    print("and a line without a logger", flush=True)
sys.exit(7)
"""
CALL = "from flows.outliving import outlive_the_reader; outlive_the_reader()"


@pytest.mark.parametrize(("call", "code"), [(CALL, 7), ("", 1)], ids=["ours", "as rich has it"])
def test_nobody_reads_and_the_process_goes_on(call: str, code: int) -> None:
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", LOGS.format(call=call)], stdout=write, stderr=write) as process:
        os.close(write)
        os.close(read)
        assert process.wait(timeout=120) == code
