"""Sizes are checked before the work: what cannot fit into memory is refused with both numbers."""

import functools
import json
import os
import re
import threading
import time

import pytest
from daily import with_cases

import pipejax as pj
from pipejax.base import checks
from pipejax.base.checks import _container_limits, check_fits, divisors, legal_divisors, memory
from pipejax.base.files import read_file

TOO_LARGE = "need(s)? at least .* GB of memory; this machine has"
HUGE = 10**9


def timed(call, message):
    """Return the processor time of a call that is refused [s]."""
    began = time.process_time()
    with pytest.raises((ValueError, OSError), match=message):
        call()
    return time.process_time() - began


@pytest.mark.parametrize("name", pj.schedules.names())
@pytest.mark.parametrize(("workers", "microbatches"), [(4, HUGE), (10**6, 4), (HUGE, HUGE)])
def test_tables_that_cannot_fit_are_refused_at_once(name, workers, microbatches):
    size = {"num_workers": workers, "num_microbatches": microbatches}
    why = f"^{workers} workers.*{TOO_LARGE}"
    assert timed(lambda: pj.schedules.build(name, **size), why) < 0.5


def test_the_memory_that_is_there_decides(monkeypatch):
    size = {"num_workers": 8, "num_microbatches": 500}
    monkeypatch.setattr(checks, "memory", lambda: 5_000_000)  # 8000 ops of 600 bytes, and cells
    for name in ("gpipe", "chimera", "hanayo", "interleaved-1f1b"):
        with pytest.raises(ValueError, match=TOO_LARGE):
            pj.schedules.build(name, **size)
    pj.schedules.build("pipedream", **size)  # which needs less: it is drawn, not made of objects
    monkeypatch.setattr(checks, "memory", lambda: 500_000)
    with pytest.raises(ValueError, match=TOO_LARGE):
        pj.schedules.build("pipedream", **size)


def test_uneven_rows_and_programs_are_refused_too(monkeypatch):
    rows = [["0F0", "0B0"], *[[f"{w}F0", f"{w}B0"] for w in range(1, 40)]]
    rows[0] += [""] * 10_000
    table = pj.ScheduleTable.from_rows(rows)
    monkeypatch.setattr(checks, "memory", lambda: 10_000 * 40 * 32)
    with pytest.raises(ValueError, match=f"40 workers x 10002 slots {TOO_LARGE}"):
        pj.ScheduleTable.from_rows(rows)
    with pytest.raises(ValueError, match=f"a program of .* slots {TOO_LARGE}"):
        pj.lower(table)


def test_limits_of_containers_count(tmp_path):
    whole = memory(tmp_path, tmp_path / "none")
    membership = tmp_path / "own"
    for version, line, folder, file in (
        (2, "0::/a/b", tmp_path / "a", "memory.max"),
        (1, "4:memory:/a/b", tmp_path / "memory" / "a", "memory.limit_in_bytes"),
    ):
        membership.write_text(f"3:cpu:/other\n{line}\n")
        (folder / "b").mkdir(parents=True)
        (folder / "b" / file).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
        _container_limits.cache_clear()  # a process stays in its group
        assert memory(tmp_path, membership) == whole
        (folder / file).write_text("1000000\n")  # of the group around it
        _container_limits.cache_clear()
        assert memory(tmp_path, membership) == 1_000_000
        (folder / file).unlink()
    with pytest.raises(ValueError, match=f"it {TOO_LARGE}"):
        check_fits(10**40, "it needs")


T = ["--stage-times", "F=1,B=2"]
TWO = ["--workers", 2, "--microbatches", 2]
ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches"]
MODEL = ["--model", "gpt-22b", "--system", "h100"]
SEARCHED = [*MODEL, "--workers", 4, "--minibatch", HUGE]
GPIPE = ["jitter", "--schedules", "gpipe"]
NEAREST = "7 microbatches do not divide a minibatch of 1000000000: the nearest that do are 5 and 8"
COMMANDS = {
    "evaluate": (["evaluate", *ONE, HUGE, *T], TOO_LARGE),
    "digits": (["evaluate", *ONE, "9" * 5000, *T], "--microbatches"),
    "beyond": (["evaluate", *ONE, 10**30, *T], "--microbatches must be at most 1000000000"),
    "minibatch": (["evaluate", *ONE, 7, *MODEL, "--minibatch", HUGE], NEAREST),
    "compare": (["compare", *GPIPE[1:], "--workers", 10**6, "--microbatches", "8", *T], TOO_LARGE),
    "jitter": ([*GPIPE, "--workers", 4, "--microbatches", HUGE, *T], TOO_LARGE),
    "samples": ([*GPIPE, *TWO, *T, "--samples", 2**33], "--samples must be at most"),
    "optimize": (["optimize", *ONE, HUGE, *T, "--memory-limit", 2, "--no-store"], TOO_LARGE),
    "show": (["show", *ONE, HUGE], TOO_LARGE),
    "width": (["show", *ONE, 4, "--width", HUGE], "--width"),
    "sensitivity": (["sensitivity", *ONE, HUGE, *MODEL, "--minibatch", HUGE], TOO_LARGE),
    "tune": (["tune", *SEARCHED], f"{HUGE} microbatches {TOO_LARGE}"),
    "tune all": (["tune", *SEARCHED, "--method", "exhaustive"], f"{HUGE} microbatches {TOO_LARGE}"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_at_once(command, mistake, monkeypatch):
    monkeypatch.setattr(checks, "memory", lambda: 25 * 10**9)
    arguments, message = COMMANDS[command]
    began = time.process_time()
    line = mistake(*arguments)
    assert re.search(message, line), line
    assert time.process_time() - began < 2


RUNS = {"step_sizes": [0.5], "seeds": range(3)}


def quadratic():
    return pj.training.random_quadratic(2, dimension=4, seed=0)


def replay(**options):
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=4)
    return pj.training.sweep_replay(quadratic(), table, **RUNS | options)


def randomized(**options):
    return pj.training.sweep_randomized_pipedream(quadratic(), **RUNS, **options)


TRAINING = {  # and what the error says before the memory
    "seeds": (lambda: replay(seeds=range(HUGE)), f"{HUGE} runs"),
    "times": (lambda: replay(times=HUGE), "3 runs"),
    "dimension": (lambda: pj.training.random_quadratic(2, dimension=HUGE, seed=0), "600 examples"),
    "batch size": (
        lambda: pj.training.random_quadratic(2, dimension=4, batch_size=HUGE, seed=0),
        "60000000000 examples",
    ),
    "updates": (lambda: randomized(updates=HUGE, interval=HUGE // 10, delta=3), "3 runs"),
}


@pytest.mark.parametrize("size", TRAINING)
def test_training_refuses_at_once(size, monkeypatch):
    monkeypatch.setattr(checks, "memory", lambda: 25 * 10**9)
    call, words = TRAINING[size]
    assert timed(call, f"{words}.*{TOO_LARGE}") < 2


def test_a_grid_that_cannot_fit_is_refused(tmp_path):
    field = {"from": 1, "to": 9, "points": 10**6}
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 2, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "systems": "h100"}
    system = {"network": {"latency_us": field, "bandwidth_GB_per_s": field}}
    why = f"1,000,000,000,000 points {TOO_LARGE}"
    run = functools.partial(pj.run_sweep, grid | {"system": system}, tmp_path / "out.zarr")
    assert timed(run, why) < 1
    assert not list(tmp_path.iterdir())


def test_divisors_are_counted_by_their_roots():
    for total in range(1, 200):
        assert divisors(total) == [d for d in range(1, total + 1) if total % d == 0]
    assert len(divisors(10**9)) == 100
    assert legal_divisors(12, 5) == "legal are 1, 2, 3, 4, 6, 12"
    assert legal_divisors(10**9, 7) == "the nearest that do are 5 and 8"
    assert legal_divisors(10**9, 10**10) == "the nearest that do are 1000000000"


def test_many_keys_are_read_in_linear_time(tmp_path):
    path = tmp_path / "x.json"
    many = json.dumps({f"key{k}": k for k in range(200_000)})[:-1]
    path.write_text(many + "}")
    assert timed(lambda: pj.load_model(path), "key") < 2
    path.write_text(many + ', "key7": 1}')
    assert timed(lambda: pj.read_table(path), "'key7' stands twice") < 2


@pytest.mark.parametrize("read", [pj.read_table, pj.load_model, pj.load_system, pj.read_costs])
def test_large_and_odd_files_are_refused(read, tmp_path):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    reads = functools.partial(read, table=table) if read is pj.read_costs else read
    path = tmp_path / "x.json"
    path.write_text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}")
    assert timed(lambda: reads(path), "nested too deeply") < 2
    path.write_text('{"a": ' + "9" * 5000 + "}")
    assert timed(lambda: reads(path), "is not JSON") < 2
    (tmp_path / "folder.json").mkdir()
    timed(lambda: reads(tmp_path / "folder.json"), "directory")
    os.mkfifo(tmp_path / "pipe.json")
    timed(lambda: reads(tmp_path / "pipe.json"), "a named pipe may never end")


def test_long_values_of_a_table_are_not_repeated(tmp_path):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    pj.write_table(table, tmp_path / "good.json")
    data = json.loads((tmp_path / "good.json").read_text())
    for odd in ({"name": "x" * 10**6}, {"stage_shares": [1] * 10**5}):
        (tmp_path / "odd.json").write_text(json.dumps(data | odd))
        with pytest.raises(pj.ScheduleError) as error:
            pj.read_table(tmp_path / "odd.json")
        assert len(error.value.reason) < 500


def test_only_as_much_is_read_as_the_machine_could_work_with(tmp_path, monkeypatch):
    monkeypatch.setattr("pipejax.base.files.memory", lambda: 30_000_000)
    path = tmp_path / "x.csv"
    with path.open("wb") as file:
        file.truncate(10**12)  # takes no room, and would take minutes to read
    assert (
        timed(lambda: pj.read_table(path), "has 1,000,000 MB or more, .* work with at most 0 MB")
        < 1
    )
    assert timed(lambda: pj.read_table("/dev/zero"), "MB or more") < 1
    path.write_bytes(b"0F0,0B0\n")
    assert pj.read_table(path).num_workers == 1


def test_pipes_without_a_name_are_read(tmp_path):
    reader, writer = os.pipe()
    threading.Thread(target=lambda: (os.write(writer, b"0F0,0B0\n"), os.close(writer))).start()
    assert read_file(f"/dev/fd/{reader}") == b"0F0,0B0\n"
    os.close(reader)


@with_cases(
    "content message",
    (b"0F0," * 10**4, "stands twice"),
    (b"x" * 10**7, "field larger"),
    (b"0F0," + b"," * 10**5, "missing op 0B0"),
    (b"0F0\n" * 10**3, "0F0 is on worker 0"),
)
def test_wide_and_long_files_are_read_in_linear_time(content, message, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    assert timed(lambda: pj.read_table(path), message) < 4
