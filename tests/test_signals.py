"""Processes of the command line that are interrupted: one line, an exit code, and whole files."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import pipejax as pj
from pipejax.search.schedule.store import read_entry

MODEL = ["--model", "gpt-22b", "--system", "a100", "--minibatch", "64", "--tensor-parallel", "8"]
LONG = ["--schedule", "1f1b", "--workers", "8", "--microbatches", "64"]
SEARCH = [*LONG, "--stage-times", "F=10,I=11,W=9", "--comm", "14"]
# SIGINT is ignored in what a shell starts in the background; a byte says that our code begins
START = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from pipejax.cli import main; os.write({}, b'.'); main()"
)


def begin(arguments, **how):
    """Start a process; return it once the entry point is reached."""
    heard, told = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(told), *map(str, arguments)],
        pass_fds=[told],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **how,
    )
    os.close(told)
    assert os.read(heard, 1) == b"."
    os.close(heard)
    return process


def ended(process, number):
    """Send a signal; return stdout, stderr and how long the process went on."""
    process.send_signal(number)
    begun = time.monotonic()
    out, err = process.communicate(timeout=30)
    return out, err, time.monotonic() - begun


def check_interrupted(process, err, seconds, number):
    assert process.returncode == 128 + number, err
    assert err.startswith("error: interrupted" + " by SIGTERM" * (number == signal.SIGTERM))
    assert err.count("\n") == 1, err
    assert seconds < 4  # 2 s, and as much for a busy machine


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_an_interrupt_while_modules_are_imported(seconds):
    process = begin(["sensitivity", *LONG, *MODEL])  # JAX among them
    time.sleep(seconds)
    out, err, took = ended(process, signal.SIGINT)
    check_interrupted(process, err, took, signal.SIGINT)
    assert (out, err) == ("", "error: interrupted\n")


def test_a_search_ends_with_the_best_so_far(tmp_path):
    files = ["--store", tmp_path / "store", "--out", tmp_path / "x.csv"]
    process = begin(["optimize", *SEARCH, "--memory-limit", "4", *files, "--json"])
    until = time.monotonic() + 60
    while not list(tmp_path.glob("store/*.json")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.5)  # it is stored before the command hears of it
    out, err, took = ended(process, signal.SIGTERM)
    check_interrupted(process, err, took, signal.SIGTERM)
    assert err == "error: interrupted by SIGTERM: this is the best so far\n"
    found = json.loads(out)
    assert (found["status"], found["stopped"]) == ("feasible", "interrupted")
    assert pj.read_table(tmp_path / "x.csv").num_workers == 8
    assert list(tmp_path.rglob("*.draft-*")) == []
    assert all(read_entry(path).table for path in tmp_path.glob("store/*.json"))


ENDING = """
import hashlib, signal, sys, time
signal.signal(signal.SIGINT, signal.{start})
from pipejax.base.progress import if_interrupted
from pipejax.cli.process import watch_signals

def fail():
    raise OSError("disk full")

watch_signals()
with if_interrupted(lambda: {last_words}):
    sys.stdout.write("ready")
    sys.stdout.flush()
    {work}
"""
DEAF = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # like a compiler: it runs no handler
SWALLOWS = """
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass"""
SIGINT = signal.SIGINT
# what is done at an interrupt, and meanwhile; signals; most seconds; what the line adds
ENDS = {
    "at work": ("None", "time.sleep(60)", [SIGINT], 1, ""),
    "in a long call": ("'half done'", DEAF, [SIGINT], 1, ": half done"),
    "whatever catches it": ("None", SWALLOWS, [SIGINT], 1, ""),
    "in words that take too long": ("time.sleep(60)", "time.sleep(60)", [SIGINT], 2, ""),
    "twice": ("time.sleep(60)", "time.sleep(60)", [SIGINT, SIGINT], 1, ""),
    "with words that fail": (
        "fail()",
        "time.sleep(60)",
        [SIGINT],
        1,
        ": not all that was found could be reported: disk full",
    ),
}


def start_ending(last_words, work, start="default_int_handler", argument=""):
    code = ENDING.format(last_words=last_words, work=work, start=start)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(argument)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(5) == "ready"
    return process


@pytest.mark.parametrize("case", ENDS)
def test_a_process_ends(case):
    last_words, work, signals, most, adds = ENDS[case]
    process = start_ending(last_words, work)
    for number in signals[1:]:
        process.send_signal(number)
        time.sleep(0.3)
    out, err, took = ended(process, signals[0])
    assert (process.returncode, out, err) == (130, "", f"error: interrupted{adds}\n")
    assert took < 2 * most


def test_a_signal_that_is_ignored_stays_so():
    process = start_ending("None", "time.sleep(60)", start="SIG_IGN")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    _, err, _ = ended(process, signal.SIGTERM)
    assert (process.returncode, err) == (143, "error: interrupted by SIGTERM\n")


def test_what_is_being_written_leaves_what_was_there(tmp_path):
    (tmp_path / "x.csv").write_text("old")
    write = """from pipejax.base.files import drafted
    with drafted(sys.argv[1]) as draft:
        draft.write_text("half")
        sys.stderr.write("half\\n")
        sys.stderr.flush()
        time.sleep(60)"""
    process = start_ending("None", write, argument=tmp_path / "x.csv")
    assert process.stderr.readline() == "half\n"
    assert len(list(tmp_path.iterdir())) == 2
    _, err, _ = ended(process, signal.SIGINT)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.csv", "old")]


def test_a_library_handles_no_signals():
    code = """import signal, threading, pipejax.cli.app
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, threading.active_count())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True 1\n"
