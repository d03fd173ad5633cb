"""Processes of the command line that are interrupted: one line, an exit code, and whole files."""

import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xarray as xr

import pipejax as pj
from pipejax.search.schedule.store import read_entry

ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8", "--stage-times", "F=1,B=2"]
MODEL = ["--model", "gpt-22b", "--system", "a100", "--minibatch", "64", "--tensor-parallel", "8"]
LONG = ["--schedule", "1f1b", "--workers", "8", "--microbatches", "64"]
SEARCH = [*LONG, "--stage-times", "F=10,I=11,W=9", "--comm", "14"]
GRID = """
schedules = ["gpipe", "1f1b", "chimera"]
workers = [4, 8]
minibatch = [16, 32, 64]
microbatch_size = [1, 2, 4]
models = "tabular-128l"
systems = ["fast_nw_slow_cp", "slow_nw_fast_cp"]
"""
RUNS_CSV = """\
model,tensor,context,expert,data,pipeline,stages_per_worker,microbatch_size,global_batch,zero,\
embedding_units,loss_units,accelerators_per_node,sequence_parallel,overlap,schedule,recompute,\
precision,stack,seconds
gpt3-175b,8,1,1,1,8,1,1,64,0,0,0,8,1,0,1f1b,none,bf16,megatron-lm-2021,18.13
"""  # every column: a default that is taken is a warning
TESTS = Path(__file__).parent
JOB = str(TESTS.parent / "examples" / "production_job.parquet")
JITTERED = shlex.split("--schedules 1f1b,gpipe -T F=1,B=2 --op lognormal:0.1")
# one command of each kind of work and of file -> (seconds that it takes at most, or is left, its arguments); {} is a folder of its own
RUNS = {
    "optimize": (6, [*SEARCH, "--memory-limit", "4", "--store", "{}/store", "--out", "{}/x.csv"]),
    "tune messages": (8, [*SEARCH, "--iterations", "9999", "--out", "{}/x.json"]),
    "formula": (8, [*LONG, "--link", "rendezvous", "--max-facets", "2000", "--out", "{}/x.json"]),
    "tune": (10, ["size,layers,recompute", *MODEL, "--workers", "8", "--method", "local"]),
    "plan": (8, [*MODEL[:4], "--gpus", "64", "--minibatch", "64", "--out", "{}/x.zarr"]),
    "sweep": (8, ["run", "{}/grid.toml", "--out", "{}/x.zarr"]),
    "jitter": (5, [*LONG[2:], *JITTERED, "--out", "{}/x.zarr"]),
    "sensitivity": (5, [*LONG, *MODEL, "--out", "{}/x.png"]),
    "show": (3, [*ONE, "--out", "{}/x.svg"]),
    "show on a page": (2, [*ONE, "--out", "{}/x.html"]),
    "export": (1.5, [*ONE, "--format", "json", "--out", "{}/x.json"]),
    "calibrate": (4, ["{}/runs.csv", "--system", "a100", "--out", "{}/x.json"]),
    "trace": (5, [JOB, "--out", "{}/x.html", "--save", "{}/saved"]),
}
# SIGINT is ignored in what a shell starts in the background; a byte says that our code begins
START = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from pipejax.cli import main; os.write({}, b'.'); main()"
)


def begin(arguments, **how):
    heard, message = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(message), *map(str, arguments)],
        pass_fds=[message],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **how,
    )
    os.close(message)
    assert os.read(heard, 1) == b"."
    os.close(heard)
    return process


def ended(process, number):
    process.send_signal(number)
    begun = time.monotonic()
    out, err = process.communicate(timeout=30)
    return out, err, time.monotonic() - begun


def check_interrupted(process, err, seconds, number):
    assert process.returncode == 128 + number, err
    sender = " by SIGTERM" if number == signal.SIGTERM else ""
    assert err.startswith(f"error: interrupted{sender}")
    assert err.count("\n") == 1, err
    assert seconds < 4  # 2 s, and as much for a busy machine


def arguments_in(folder, command):
    (folder / "grid.toml").write_text(GRID)
    (folder / "runs.csv").write_text(RUNS_CSV)
    words = command.split() if command.startswith("tune") else command.split()[:1]
    return [*words, *(part.replace("{}", str(folder)) for part in RUNS[command][1])]


def check_whole(folder):
    assert [path for path in folder.rglob("*.draft-*") if path.exists()] == []
    for path in folder.glob("x.csv"):
        pj.read_table(path)
    for path in folder.glob("x.json"):
        if "table" in json.loads(path.read_text()).get("format", ""):
            pj.read_table(path)
    for path in folder.glob("store/*.json"):
        assert read_entry(path).table
    for path in folder.glob("x.zarr"):
        with xr.open_zarr(path) as data:
            data.load()
    for path in folder.glob("x.svg"):
        assert path.read_text().rstrip().endswith("</svg>")
    for path in folder.glob("x.html"):
        assert path.read_text().endswith("</html>\n")
    for path in folder.glob("x.png"):
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_an_interrupt_while_modules_are_imported(seconds):
    process = begin(["sensitivity", *LONG, *MODEL])  # JAX among them
    time.sleep(seconds)
    out, err, took = ended(process, signal.SIGINT)
    check_interrupted(process, err, took, signal.SIGINT)
    assert (out, err) == ("", "error: interrupted\n")


def test_a_search_ends_with_the_best_so_far(tmp_path):
    process = begin([*arguments_in(tmp_path, "optimize"), "--json"])
    until = time.monotonic() + 60
    while not list(tmp_path.glob("store/*.json")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    # the command has been told of the plan before it was stored
    out, err, took = ended(process, signal.SIGTERM)
    check_interrupted(process, err, took, signal.SIGTERM)
    assert err == "error: interrupted by SIGTERM: this is the best so far\n"
    result = json.loads(out)
    assert (result["status"], result["stopped"]) == ("feasible", "interrupted")
    assert pj.read_table(tmp_path / "x.csv").num_workers == 8
    check_whole(tmp_path)


ENDING = (TESTS / "data" / "program_that_ends.txt").read_text()
DEAF = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # like a compiler: it runs no handler
SWALLOWS = """
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass"""
SIGINT = signal.SIGINT
FULL = ": a part of the result could not be reported: disk full"
# what is done at an interrupt, and meanwhile; signals; most seconds; what the line adds
ENDS = {
    "at work": ("None", "time.sleep(60)", [SIGINT], 1, ""),
    "in a long call": ("'half done'", DEAF, [SIGINT], 1, ": half done"),
    "whatever catches it": ("None", SWALLOWS, [SIGINT], 1, ""),
    "in words that take too long": ("time.sleep(60)", "time.sleep(60)", [SIGINT], 2, ""),
    "twice": ("time.sleep(60)", "time.sleep(60)", [SIGINT, SIGINT], 1, ""),
    "with words that fail": ("fail()", "time.sleep(60)", [SIGINT], 1, FULL),
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
    last_words, work, signals, largest, adds = ENDS[case]
    process = start_ending(last_words, work)
    for number in signals[1:]:
        process.send_signal(number)
        time.sleep(0.3)
    out, err, took = ended(process, signals[0])
    assert (process.returncode, out, err) == (130, "", f"error: interrupted{adds}\n")
    assert took < 2 * largest


def test_a_signal_that_is_ignored_stays_so():
    process = start_ending("None", "time.sleep(60)", start="SIG_IGN")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    _, err, _ = ended(process, signal.SIGTERM)
    assert (process.returncode, err) == (143, "error: interrupted by SIGTERM\n")


def test_what_is_being_written_leaves_what_was_there(tmp_path):
    (tmp_path / "x.csv").write_text("old")
    write = """from pipejax.base.files import atomic_write
    with atomic_write(sys.argv[1]) as draft:
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


def moments(count):
    """Commands, signals and times, the same ones each time; no command is left out."""
    draw = random.Random(0)
    names = [*RUNS] * (count // len(RUNS) + 1)
    return [
        (name, number, round(draw.uniform(0.05, RUNS[name][0]), 2))
        for name, number in zip(
            names[:count], [signal.SIGINT, signal.SIGINT, signal.SIGTERM] * count, strict=False
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "number", "seconds"), moments(26))
def test_any_moment(tmp_path, command, number, seconds, call):
    process = begin(arguments_in(tmp_path, command))
    heard = select.select([process.stderr], [], [], seconds)  # closed when it ends before
    if heard[0] or process.poll() is not None:
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
    else:
        out, err, took = ended(process, number)
        print(
            f"{command} after {seconds} s: {took:.2f} s, {process.returncode}, {err!r}",
            file=sys.__stdout__,
        )
        if process.returncode:
            check_interrupted(process, err, took, number)
    assert "Traceback" not in out + err
    if command == "sweep":  # which leaves less than a whole store, and goes on with it
        code, out, err = call(*arguments_in(tmp_path, command), "--resume", "--json")
        assert (code, err) == (0, "")
        result = json.loads(out)
        counts = [result[name] for name in ("feasible", "out_of_memory", "illegal")]
        assert result["points"] == sum(counts)
    check_whole(tmp_path)
