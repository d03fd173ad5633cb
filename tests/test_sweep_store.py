"""The store of a sweep: under kill -9 and damage, from a cluster, from several processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xarray as xr
from sweep_cases import GRID, declare, refused, write_grid

from pipejax.base.files import DRAFT, locked
from pipejax.cli.app import run
from pipejax.sweep import read_sweep, run_sweep
from pipejax.sweep.store import SAME, get_block, num_blocks, open_store


def get_files(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in Path(path).rglob("*") if f.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "whole.zarr"
    run_sweep(GRID, path)
    return path


@pytest.mark.slow
def test_damaged_blocks_are_not_taken_for_whole(whole, tmp_path):
    """A chunk that was cut short, changed, emptied or lost is evaluated again, and no other."""
    path = tmp_path / "damaged.zarr"
    expected = get_files(whole)
    chunks = sorted(name for name in expected if name.startswith(("step_time/", "reason/")))
    chunks = [name for name in chunks if not Path(name).name.startswith(".")]
    damages = [
        lambda f: f.write_bytes(f.read_bytes()[: len(f.read_bytes()) // 2]),
        lambda f: f.write_bytes(bytes([f.read_bytes()[0] ^ 1]) + f.read_bytes()[1:]),
        lambda f: f.write_bytes(b""),
        lambda f: f.unlink(),
        lambda f: f.write_bytes((whole / chunks[-1]).read_bytes()),
    ]
    for damage, chunk in zip(damages, chunks, strict=False):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        damage(path / chunk)
        message = []
        run_sweep(
            GRID,
            path,
            resume=True,
            on_progress=lambda *progress, message=message: message.append(progress),
        )
        assert get_files(path) == expected
        assert len(message) == 2, "one block is evaluated, the others stay"
    shutil.rmtree(path / "schedule")
    (path / ".zmetadata").unlink()
    (path / "step_time" / ".zarray").write_text("{")
    run_sweep(GRID, path, resume=True)
    assert get_files(path) == expected, "labels and metadata come back too"
    sums = sorted(name for name in expected if name.startswith("block_checksum/"))
    (path / sums[-1]).write_bytes(b"")
    run_sweep(GRID, path, resume=True)
    assert get_files(path) == expected


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid_file"))


# runs each line as a command in a process of its own; what they import is imported once, before
# anything has started a thread
FORKS = """
import os, sys
import xarray, zarr, pipejax.sweep
from pipejax.cli.app import run
xarray.Dataset(coords={"x": [0]})
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        os._exit(run(line.split()))
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture
def start():
    """Start a command; return its process and a function that waits for how it ended."""
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def started(*arguments):
        server.stdin.write(" ".join(map(str, arguments)) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), lambda: int(server.stdout.readline())

    yield started
    server.communicate()


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def written(path):
    return len(list(path.glob("block_checksum/[0-9]*")))


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bytes(
    kills, whole, grid_file, start, tmp_path
):
    """Kills of a real process, some before the store is there, most while it is written."""
    path, rng = tmp_path / "killed.zarr", random.Random(0)
    expected = get_files(whole)
    checksums = [name for name in expected if name.startswith("block_checksum/")]
    seen = []
    for kill in range(kills):
        before = written(path)
        process, end = start("sweep", "run", grid_file, "--out", path, "--resume")
        if kill % 4 == 2:  # at any time, also before anything is written
            time.sleep(rng.uniform(0, 1))
        else:  # as soon as another block is written, and a little later
            while is_running(process) and written(path) <= before:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
        how = end()
        if how == 0:  # whole before the kill came
            break
        assert how == signal.SIGKILL
        seen.append(written(path))
    assert len(seen) >= 3
    assert any(0 < count < len(checksums) - 1 for count in seen), seen  # killed in the middle
    (path / "step_time" / "0.0.0123.partial").write_text("x")  # what Zarr leaves of a chunk
    _, end = start("sweep", "run", grid_file, "--out", path, "--resume", "--json")
    assert end() == 0
    assert get_files(path) == expected
    data = xr.open_zarr(path).load()
    assert data.identical(xr.open_zarr(whole).load())
    assert (data.status != 0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["killed.zarr"]  # no drafts left


def test_killed_before_the_store_is_made_it_begins_anew(whole, tmp_path, monkeypatch):
    """At any step in which labels and metadata come to their place; then without --resume."""
    sweep, expected, replace = read_sweep(GRID), get_files(whole), os.replace
    metadata = {name for name in expected if Path(name).name.startswith(".")}
    for step in (0, 1, 2, 9):
        path, calls = tmp_path / f"{step}.zarr", [step]

        def killed(*paths, calls=calls):
            calls[0] -= DRAFT in str(paths[0]) and not str(paths[0]).endswith(".partial")
            if calls[0] < 0:
                raise KeyboardInterrupt
            replace(*paths)

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt), open_store(sweep, path, resume=False):
            pass
        monkeypatch.setattr(os, "replace", replace)
        with open_store(sweep, path, resume=step > 0):
            assert metadata <= set(get_files(path))
        result = get_files(path)
        assert {name: result[name] for name in metadata} == {n: expected[n] for n in metadata}


CLUSTER = """
import os, pathlib, signal, sys, threading, time
from distributed import LocalCluster
from pipejax.cli.app import run
out, grid = map(pathlib.Path, sys.argv[1:])
with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
    killed = []
    def kill():
        while len(list(out.glob("block_checksum/[0-9]*"))) < 2:
            time.sleep(0.001)
        os.kill(cluster.workers[0].pid, signal.SIGKILL)
        killed.append(True)
    threading.Thread(target=kill, daemon=True).start()
    address = cluster.scheduler_address
    code = run(["sweep", "run", str(grid), "--out", str(out), "--scheduler", address, "--json"])
    sys.exit(code or not killed)
"""


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_gives_the_same_bytes(whole, grid_file, tmp_path):
    out = tmp_path / "cluster.zarr"
    client = subprocess.run(
        [sys.executable, "-c", CLUSTER, out, grid_file],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=120,
    )
    assert client.returncode == 0, client.stderr
    result = json.loads(client.stdout)
    assert (result["not_evaluated"], result["evaluated_now"]) == (0, read_sweep(GRID).num_points)
    assert get_files(out) == get_files(whole)


def test_one_process_writes_at_a_time(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out.zarr")
    with (
        locked(tmp_path / "out.zarr", wait=False),
        pytest.raises(BlockingIOError, match="another process"),
    ):
        run_sweep(GRID, tmp_path / "out.zarr", resume=True)


@pytest.fixture(scope="module")
def declared(tmp_path_factory):
    return declare(tmp_path_factory.mktemp("declared"))


def test_nothing_is_overwritten(whole, grid_file, declared, tmp_path, capsys):
    before = get_files(whole)
    assert "it exists: go on with it by --resume" in refused(capsys, grid_file, "--out", whole)
    text = refused(capsys, declared, "--out", whole, "--resume")
    assert "holds another grid: give another --out" in text
    assert get_files(whole) == before
    other = tmp_path / "folder"
    other.mkdir()
    (other / "precious").write_text("x")
    assert "is not the dataset of a sweep" in refused(capsys, grid_file, "--out", other, "--resume")
    assert "it exists" in refused(capsys, grid_file, "--out", other)
    assert "is not the dataset" in refused(capsys, grid_file, "--out", other, "--force")
    text = refused(capsys, grid_file, "--out", whole, "--force", "--resume")
    assert "choose one" in text
    (other / ".zattrs").write_text("[]")
    assert "is not the dataset of a sweep" in refused(capsys, grid_file, "--out", other, "--resume")
    (tmp_path / "file").write_text("x")
    assert "file" in refused(capsys, grid_file, "--out", tmp_path / "file" / "out.zarr")
    assert (tmp_path / "file").read_text() == "x"
    assert (other / "precious").read_text() == "x"


def test_other_code_is_refused(tmp_path):
    sweep, path = read_sweep(GRID), tmp_path / "old.zarr"
    with open_store(sweep, path, resume=False):
        pass
    attributes = json.loads((path / ".zattrs").read_text())
    (path / ".zattrs").write_text(json.dumps(attributes | {"code": "older"}))
    metadata = json.loads((path / ".zmetadata").read_text())
    metadata["metadata"][".zattrs"]["code"] = "older"
    (path / ".zmetadata").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=r"was begun with code older, this is .*would not match"):
        run_sweep(GRID, path, resume=True)


def test_report_for_people(whole, grid_file, capsys):
    assert run(["sweep", "run", str(grid_file), "--out", str(whole), "--resume", "--details"]) == 0
    printed = capsys.readouterr().out
    assert "560 points" in printed
    assert "microbatch size 5 does not divide a minibatch of 12" in printed


def test_a_store_is_begun_anew_where_that_is_asked_for(tmp_path):
    path, attributes = tmp_path / "out.zarr", dict.fromkeys(SAME, "another")
    path.mkdir()
    (path / ".zattrs").write_text(json.dumps(attributes))
    (path / "old").mkdir()
    (path / "old" / "0").write_text("x")
    with (
        pytest.raises(FileExistsError, match="begin anew by --force"),
        open_store(read_sweep(GRID), path),
    ):
        pass
    with open_store(read_sweep(GRID), path, replace=True) as store:
        assert not store.is_whole(get_block(read_sweep(GRID), 0))
    assert not (path / "old").exists()
    assert json.loads((path / ".zattrs").read_text())["grid"] == read_sweep(GRID).to_json()


def test_a_store_forgets_nothing(tmp_path):
    sweep = read_sweep(GRID)
    with open_store(sweep, tmp_path / "empty.zarr", resume=False) as store:
        blocks = [get_block(sweep, number) for number in range(num_blocks(sweep))]
        assert not any(map(store.is_whole, blocks))
    data = xr.open_zarr(tmp_path / "empty.zarr").load()
    assert (data.status == 0).all()
    assert data.step_time.isnull().all()


def test_force_replaces_datasets_alone(tmp_path):
    folder = tmp_path / "other.zarr"
    folder.mkdir()
    (folder / ".zattrs").write_text('{"grid": "of something else"}')
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not the dataset of a sweep"):
        run_sweep(GRID, folder, replace=True)
    store = tmp_path / "grid.zarr"
    small = GRID | {"workers": 2, "microbatch_size": 1}
    run_sweep(small, store)
    (store / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt, which is no part of a dataset"):
        run_sweep(small, store, replace=True)
    assert (store / "notes.txt").read_text() == "mine"
