"""The store of a sweep: under kill -9 and damage, from a cluster, from several processes."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xarray as xr
from sweep_cases import GRID, declare, refused, write_grid

from pipejax.base.locks import locked
from pipejax.cli.app import run
from pipejax.sweep import read_sweep, run_sweep
from pipejax.sweep.blocks import get_block, num_blocks
from pipejax.sweep.store import opened


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Processes that tests start find what others have compiled; this one compiles for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


def files_of(path):
    """Bytes of all files of a store."""
    return {str(f.relative_to(path)): f.read_bytes() for f in Path(path).rglob("*") if f.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The grid evaluated without a break."""
    path = tmp_path_factory.mktemp("whole") / "whole.zarr"
    run_sweep(GRID, path)
    return path


def test_damaged_blocks_are_not_taken_for_whole(whole, tmp_path):
    """A chunk that was cut short, changed, emptied or lost is evaluated again, and no other."""
    path = tmp_path / "damaged.zarr"
    expected = files_of(whole)
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
        told = []
        run_sweep(GRID, path, resume=True, on_progress=told.append)
        assert files_of(path) == expected
        assert len(told) == 2, "one block is evaluated, the others stay"
    shutil.rmtree(path / "schedule")
    (path / ".zmetadata").unlink()
    (path / "step_time" / ".zarray").write_text("{")
    run_sweep(GRID, path, resume=True)
    assert files_of(path) == expected, "labels and metadata come back too"
    sums = sorted(name for name in expected if name.startswith("block_checksum/"))
    (path / sums[-1]).write_bytes(b"")
    run_sweep(GRID, path, resume=True)
    assert files_of(path) == expected


def command(*arguments):
    return [sys.executable, "-c", "from pipejax.cli import main; main()", *map(str, arguments)]


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid_file"))


def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bytes(whole, grid_file, tmp_path):
    """Ten kills of a real process, some before the store is there, most while it is written."""
    path, rng = tmp_path / "killed.zarr", random.Random(0)
    expected = files_of(whole)
    checksums = [name for name in expected if name.startswith("block_checksum/")]
    seen = []
    for kill in range(10):
        process = subprocess.Popen(
            command("sweep", grid_file, "--out", path, "--resume"),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        before = len(list(path.glob("block_checksum/[0-9]*")))
        if kill % 4 == 3:  # at any time, also before anything is written
            time.sleep(rng.uniform(0, 3))
        else:  # as soon as another block is written, and a little later
            while (
                process.poll() is None and len(list(path.glob("block_checksum/[0-9]*"))) <= before
            ):
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.append(len(list(path.glob("block_checksum/[0-9]*"))))
    assert len(set(seen)) > 0, seen
    assert any(0 < count < len(checksums) - 1 for count in seen), seen  # killed in the middle
    done = subprocess.run(
        command("sweep", grid_file, "--out", path, "--resume", "--json"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["not_evaluated"] == 0
    assert files_of(path) == expected
    assert xr.open_zarr(path).load().identical(xr.open_zarr(whole).load())
    assert [p.name for p in tmp_path.iterdir()] == ["killed.zarr"]  # no drafts left


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_a_cluster_that_loses_a_worker_gives_the_same_bytes(whole, grid_file, tmp_path):
    """A real scheduler and two workers on loopback; one is killed in the middle."""
    port, out = free_port(), tmp_path / "cluster.zarr"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = (tmp_path / "log").open("w")

    def start(name, *arguments):
        code = f"from distributed.cli.{name} import main; main()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            stdout=logs,
            stderr=logs,
            cwd=tmp_path,
        )

    address = f"tcp://127.0.0.1:{port}"
    servers = [
        start("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
    ]
    worker = (
        "dask_worker",
        address,
        "--nthreads",
        "1",
        "--no-nanny",
        "--no-dashboard",
        "--local-directory",
        str(tmp_path / "scratch"),
    )
    servers += [start(*worker), start(*worker)]
    try:
        client = subprocess.Popen(
            command("sweep", grid_file, "--out", out, "--scheduler", address, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(
            lambda: len(list(out.glob("block_checksum/[0-9]*"))) >= 2 or client.poll(), "two blocks"
        )
        servers[1].kill()
        printed, problem = client.communicate(timeout=120)
    finally:
        for server in servers:
            server.kill()
            server.wait()
        logs.close()
    assert client.returncode == 0, problem
    found = json.loads(printed)
    assert (found["not_evaluated"], found["evaluated_now"]) == (0, read_sweep(GRID).num_points)
    assert files_of(out) == files_of(whole)


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
    before = files_of(whole)
    assert "it exists: go on with it by --resume" in refused(capsys, grid_file, "--out", whole)
    text = refused(capsys, declared, "--out", whole, "--resume")
    assert "holds another grid: give another --out" in text
    assert files_of(whole) == before
    other = tmp_path / "folder"
    other.mkdir()
    (other / "precious").write_text("x")
    assert "is not the dataset of a sweep" in refused(capsys, grid_file, "--out", other, "--resume")
    assert "it exists" in refused(capsys, grid_file, "--out", other)
    (other / ".zattrs").write_text("[]")
    assert "is not the dataset of a sweep" in refused(capsys, grid_file, "--out", other, "--resume")
    (tmp_path / "file").write_text("x")
    assert "file" in refused(capsys, grid_file, "--out", tmp_path / "file" / "out.zarr")
    assert (tmp_path / "file").read_text() == "x"
    assert (other / "precious").read_text() == "x"


def test_other_code_is_refused(tmp_path):
    sweep, path = read_sweep(GRID), tmp_path / "old.zarr"
    with opened(sweep, path, resume=False):
        pass
    attributes = json.loads((path / ".zattrs").read_text())
    (path / ".zattrs").write_text(json.dumps(attributes | {"code": "older"}))
    metadata = json.loads((path / ".zmetadata").read_text())
    metadata["metadata"][".zattrs"]["code"] = "older"
    (path / ".zmetadata").write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=r"was begun with code older, this is .*would not match"):
        run_sweep(GRID, path, resume=True)


def test_report_for_people(whole, grid_file, capsys):
    assert run(["sweep", str(grid_file), "--out", str(whole), "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "560 points" in printed
    assert "560 were there" in printed
    assert "illegal: microbatch size 5 does not divide a minibatch of 12" in printed


def test_a_store_forgets_nothing(tmp_path):
    sweep = read_sweep(GRID)
    with opened(sweep, tmp_path / "empty.zarr", resume=False) as store:
        blocks = [get_block(sweep, number) for number in range(num_blocks(sweep))]
        assert not any(map(store.is_whole, blocks))
    data = xr.open_zarr(tmp_path / "empty.zarr").load()
    assert (data.status == 0).all()
    assert data.step_time.isnull().all()
