"""Processes end together: none is left behind, and what fails is told."""

import json
import os
import subprocess
import sys
import time

import pytest

import pipejax as pj
from pipejax.cli.app import run as command
from pipejax.runtimes.gloo import runtime
from pipejax.runtimes.processes import RuntimeJob

TABLE = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)


def children():
    """Processes that this one has started."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if runtime.MODULE in line]


def test_a_deadlock_ends_by_time(monkeypatch):
    monkeypatch.setattr(runtime, "START_UP", 15.0)
    monkeypatch.setattr(runtime, "PER_STEP", 1.0)
    sent = pj.links.insert_transfers(TABLE, lowering="pytorch")
    # the second rank never posts what the first waits for
    monkeypatch.setattr(runtime, "to_csv", lambda table: "0F0,0SEND_F0,0WAIT_SEND_F0\n1F0,1B0\n")
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"process [01] of 2"):
        runtime.run_tables([RuntimeJob(sent)])
    assert time.monotonic() - begun < 60
    assert children() == []


def test_what_a_rank_says_is_told(monkeypatch):
    monkeypatch.setattr(runtime, "to_csv", lambda table: "0F0,0Q0\n1F0,1B0\n")
    with pytest.raises(RuntimeError, match="Invalid action string"):
        runtime.run_tables([RuntimeJob(TABLE)])
    assert children() == []


def test_ranks_end_with_their_caller():
    code = (
        "import pipejax as pj\nfrom pipejax.runtimes.gloo import runtime\n"
        "from pipejax.runtimes.processes import RuntimeJob\n"
        "t = pj.schedules.build('1f1b', num_workers=2, num_microbatches=2)\n"
        "c = pj.Costs(forward=30.0, backward=30.0)\n"
        "print('up', flush=True)\nruntime.run_tables([RuntimeJob(t, costs=c)])\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert caller.stdout.readline() == b"up\n"
    time.sleep(8)  # its ranks have met by then, and are in their first op
    ranks = subprocess.run(
        ["ps", "--ppid", str(caller.pid), "-o", "pid="], capture_output=True, text=True
    ).stdout.split()
    assert len(ranks) == 2
    caller.kill()
    caller.wait()
    end = time.monotonic() + 5
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)


def test_the_command(capsys):
    options = ["run", "-s", "zb-h1", "-P", "2", "-M", "3", "--runtime", "torch", "--json"]
    assert command(options) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runtime"] == "torch"
    assert result["gradient_error"] < 1e-12
    times = ["-T", "F=0.05,B=0.1", "--comm", "0.01", "--steps", "2", "--json"]
    assert command([*options[:-1], *times]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["step_times"]) == 2
    assert result["profile"]["I"][0] < 0.03 < 0.05 <= result["profile"]["W"][1] <= 0.08
    assert 0.01 <= result["message"][0] < 0.03
    assert abs(result["predicted"] / result["step_time"] - 1) < 0.1
