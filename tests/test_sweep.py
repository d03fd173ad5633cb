"""Sweeps: the numbers against single evaluations, and mistakes in what is declared."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from daily import read_cases
from legal_sizes import build
from sweep_cases import GRID, TOML, declare, refused, write_grid

import pipejax as pj
from pipejax.analysis.step.outputs import OUTPUTS, SWEPT, StepOutput
from pipejax.base.files import DRAFT, locked
from pipejax.cli.app import run
from pipejax.costs.system.parts import RESOURCES
from pipejax.sweep import STATUS, read_sweep, run_sweep
from pipejax.sweep.declaration import read_system_axes
from pipejax.sweep.results import read_results
from pipejax.sweep.store import SAME, get_block, num_blocks, open_store


@pytest.fixture(scope="module")
def declared(tmp_path_factory):
    return declare(tmp_path_factory.mktemp("declared"))


@pytest.fixture(scope="module")
def data(declared, tmp_path_factory):
    return run_sweep(declared, tmp_path_factory.mktemp("out") / "out.zarr").load()


def test_axes_and_units(data):
    sizes = {"schedule": 3, "model": 2, "microbatch_size": 3, "recompute": 2, "system": 2}
    sizes |= {"node.gpus": 2, "network.bandwidth": 3, "memory.capacity": 2, "compute.efficiency": 1}
    assert dict(data.step_time.sizes) == sizes
    np.testing.assert_allclose(data["network.bandwidth"], [1e9, 1e10, 1e11])
    assert data["network.bandwidth"].attrs["units"] == "B/s"
    assert data.step_time.attrs["units"] == "s"
    assert [*data.schedule.values] == ["gpipe", "chimera", "interleaved-1f1b stages_per_worker=2"]
    assert int(data.workers) == 2
    assert str(data.link.values) == "delay"
    for key in ("pipejax", "jax", "commit", "code", "grid", "dtype", "title"):
        assert data.attrs[key]
    assert data.status.dtype == np.int8
    assert data.status.attrs["flag_meanings"].split() == [s.replace(" ", "_") for s in STATUS]


def test_points_are_single_evaluations(data):
    rng = random.Random(1)
    names = {
        "gpipe": ("gpipe", {}),
        "chimera": ("chimera", {}),
        "interleaved-1f1b stages_per_worker=2": ("interleaved-1f1b", {"stages_per_worker": 2}),
    }
    stacked = data.stack(point=data.step_time.dims)
    legal = np.flatnonzero(stacked.status != STATUS.index("illegal"))
    for number in rng.sample(legal.tolist(), 12):
        at = stacked.isel(point=number)
        name, options = names[str(at.schedule.values)]
        table = build(name, 2, 8 // int(at.microbatch_size), **options)
        model, recompute = str(at.model.values), str(at.recompute.values)
        workload = pj.Workload(pj.load_model(model), 8, tensor_parallel=2, recompute=recompute)
        system = make_system(at)
        costs = pj.stage_costs(workload, system, table)
        result = pj.evaluate(table, costs)
        assert float(at.step_time) == result.makespan
        assert float(at.bubble_ratio) == pytest.approx(result.bubble_ratio, rel=1e-9)
        tokens = 8 * workload.model.sequence
        assert float(at.tokens_per_second) == pytest.approx(tokens / result.makespan, rel=1e-12)
        per_accelerator = float(at.tokens_per_second_per_gpu)  # of 2 workers of 2
        assert per_accelerator == pytest.approx(float(at.tokens_per_second) / 4, rel=1e-12)
        need = pj.memory_bytes(workload, table).max()
        assert float(at.memory_bytes) == need
        fits = need <= system.memory_available
        assert STATUS[int(at.status)] == ("feasible" if fits else "out of memory")
        assert float(at.share.sum()) == pytest.approx(1, abs=1e-5)
        assert int(at.bound_by) == int(at.share.argmax("resource"))
    answer = pj.sensitivity(table, workload, system)
    np.testing.assert_allclose(at.share, list(answer.share.values()), atol=1e-6)
    assert RESOURCES[int(at.bound_by)] == answer.bound_by


AXES = read_cases("axes of sweeps")


@pytest.mark.parametrize("case", AXES)
def test_points_of_every_axis_are_evaluations(case, answer, tmp_path):
    grid = {"schedule": "1f1b", "workers": 4, "minibatch": 8, "microbatches": 8}
    grid |= {"model": "gpt-22b", "system": "h100", "tensor_parallel": 8} | AXES[case]
    outputs = ["bubble_ratio", *["share"] * (case == "slow workers")]
    lists = {f"{name}s": grid[name] for name in ("schedule", "model", "system")}
    rest = {name: values for name, values in grid.items() if f"{name}s" not in lists}
    data = run_sweep(lists | rest | {"outputs": outputs}, tmp_path / "out.zarr").load()
    axes = {name: values for name, values in grid.items() if isinstance(values, list)}
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        values = {name: value for name, value in (grid | point).items() if value != ""}
        options = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
        words = [word for option in options for word in option]
        result, at = answer("evaluate", *words), data.sel(point).squeeze()
        assert float(at.step_time) == pytest.approx(result["step_time"], rel=1e-12)
        assert float(at.memory_bytes) == pytest.approx(max(result["memory_bytes"]), rel=1e-12)
        assert float(at.bubble_ratio) == pytest.approx(result["bubble_ratio"], rel=1e-9)
        if "share" in outputs:
            share = answer("sensitivity", *words)["share"]
            np.testing.assert_allclose(at.share, [*share.values()], atol=1e-6)


def test_updates_on_the_host_are_evaluations(tmp_path):
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatches": 4}
    grid |= {"models": "gpt-22b", "systems": "h100", "optimizer_offload": [0.0, 0.5]}
    data, table = run_sweep(grid, tmp_path / "x.zarr").load(), build("1f1b", 2, 4)
    for k, share in enumerate(grid["optimizer_offload"]):
        workload = pj.Workload(pj.load_model("gpt-22b"), 4, optimizer_offload=share)
        run = pj.evaluate(table, pj.stage_costs(workload, pj.load_system("h100"), table))
        assert data.step_time.values[k] == pytest.approx(run.step_time, rel=1e-12)
        assert data.memory_bytes.values[k] == pj.memory_bytes(workload, table).max()


# axes, which of their points are illegal in the order of the dataset, and the reason
DATA = Path(__file__).parent / "data"
ILLEGAL = json.loads((DATA / "illegal_settings.json").read_text())


@pytest.mark.parametrize("case", ILLEGAL, ids=lambda case: str(case["axes"]))
def test_settings_that_the_command_line_refuses_are_illegal(case, tmp_path):
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
    grid |= {"models": "gpt-22b", "systems": "h100", "data_parallel": 4}
    data = run_sweep(grid | case["axes"], tmp_path / "x.zarr").load()
    assert [*(data.status.values.ravel() == STATUS.index("illegal"))] == case["illegal"]
    assert (data.step_time.isnull() == (data.status == STATUS.index("illegal"))).all()
    reasons = read_results(tmp_path / "x.zarr").frame(np.arange(data.status.size)).reason.tolist()
    assert all(case["reason"] in text for text in reasons if text)
    assert [text != "" for text in reasons] == case["illegal"]


def make_system(at):
    system = pj.load_system(str(at.system.values))
    for name in ("network.bandwidth", "memory.capacity", "compute.efficiency"):
        system = system.with_number(name, float(at[name]))
    return dataclasses.replace(system, gpus_per_node=int(at["node.gpus"]))


def test_illegal_points_say_why(data):
    reasons = data.reason.isel(model=0, recompute=0)
    assert str(reasons.sel(schedule="gpipe", microbatch_size=3).values) == (
        "microbatch size 3 does not divide a minibatch of 8"
    )
    odd = reasons.sel(schedule="chimera", microbatch_size=8)
    assert "even number of microbatches" in str(odd.values)
    illegal = data.status == STATUS.index("illegal")
    assert (illegal == data.step_time.isnull()).all()
    assert (illegal == (data.bound_by == -1)).all()
    others = [name for name in illegal.dims if name not in data.reason.dims]
    assert (illegal.any(others) == (data.reason != "")).all()
    assert set(np.unique(data.status)) == {1, 2, 3}


def test_what_is_wrong_and_not_illegal_ends_the_sweep_and_names_the_point(tmp_path, monkeypatch):
    grid = {**GRID, "schedules": ["1f1b", "pipe-offload"], "workers": [2, 8], "microbatch_size": 1}
    point = "at schedule = pipe-offload, workers = 2, recompute = none: .* has no host_link"
    with pytest.raises(ValueError, match=point):
        run_sweep(read_sweep(grid), tmp_path / "offloads.zarr")

    def broken(*arguments):
        raise ValueError("a bug of ours")

    monkeypatch.setattr("pipejax.sweep.run.memory_bytes", broken)
    point = "at schedule = 1f1b, workers = 2, recompute = none: a bug of ours"
    with pytest.raises(ValueError, match=point):
        run_sweep(read_sweep(grid), tmp_path / "broken.zarr")


def test_outputs_of_a_step_are_those_of_a_report(tmp_path):
    prices = [1.0, 2.0]  # [USD/s]
    workload = pj.Workload(pj.load_model("gpt-22b"), 8, tensor_parallel=2)
    table, system = build("gpipe", 2, 8), pj.load_system("h100")
    result = pj.evaluate(table, pj.stage_costs(workload, system, table))
    systems = [dataclasses.replace(system, price=price) for price in prices]
    reports = [pj.step_report(result, workload, priced) for priced in systems]
    names = [*reports[0].outputs]
    grid = {"schedules": "gpipe", "workers": 2, "minibatch": 8, "microbatches": 8}
    grid |= {"models": "gpt-22b", "systems": "h100", "tensor_parallel": 2, "outputs": names}
    changes = {"price": {"accelerator_USD_per_hour": [3600 * price for price in prices]}}
    data = run_sweep(read_sweep({**grid, "system": changes}), tmp_path / "run.nc").squeeze()
    for name in names:
        expected = [report.outputs[name] for report in reports]
        np.testing.assert_allclose(data[name], expected, rtol=1e-12)
    # 4 accelerators: 2 workers of 2
    np.testing.assert_allclose(data.cost_per_step, 4 * data.step_time * np.array(prices))
    with pytest.raises(ValueError, match="cost_per_step needs price, which a system lacks"):
        run_sweep(read_sweep(grid), tmp_path / "no.nc")


def test_an_output_may_follow_from_shares_of_the_critical_path(monkeypatch, tmp_path):
    names = ["compute.peak", "network.bandwidth"]
    columns = [RESOURCES.index(name) for name in names]
    output = StepOutput("1", "share", lambda steps: steps.share[:, columns].sum(axis=1))
    for outputs in (OUTPUTS, SWEPT):
        monkeypatch.setitem(outputs, "part", output._replace(needs_paths=True))
    grid = {**GRID, "workers": 2, "microbatch_size": 1, "schedules": "gpipe"}
    keys = "share", "part"
    shares, part = (run_sweep({**grid, "outputs": [key]}, tmp_path / key)[key] for key in keys)
    np.testing.assert_allclose(part, shares.sel(resource=names).sum("resource"), rtol=1e-5)
    assert float(part.min()) > 0


def test_float32_is_close(tmp_path):
    grid = {**GRID, "workers": 3, "microbatch_size": [1, 5, 12]}
    grid |= {"outputs": ["bubble_ratio", "bound_by", "share"]}
    types = "float64", "float32"
    exact, short = (run_sweep({**grid, "dtype": d}, tmp_path / d).load() for d in types)
    np.testing.assert_allclose(short.share, exact.share, atol=1e-4)
    assert short.step_time.dtype == np.float32
    np.testing.assert_allclose(short.step_time, exact.step_time, rtol=1e-5)


def test_blocks_cover_the_grid_once():
    grid = {
        **GRID,
        "system": {
            "network": {"bandwidth_GB_per_s": {"from": 1, "to": 9, "points": 700}},
            "node": {"bandwidth_GB_per_s": {"from": 1, "to": 9, "points": 333}},
        },
    }
    sweep = read_sweep(grid)
    seen = np.zeros([len(axis.values) for axis in sweep.axes], int)
    for number in range(num_blocks(sweep)):
        seen[get_block(sweep, number).cuts] += 1
    assert (seen == 1).all()


WRONG = json.loads((DATA / "sweep_mistakes.json").read_text())
NESTED = "workers = " + "[" * 5000 + "]" * 5000
WRONG += [{"old": "workers = 2", "new": NESTED, "says": "is not TOML"}]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong["says"])
def test_wrong_files(wrong, declared, tmp_path, capsys):
    assert wrong["old"] in TOML
    path, out = tmp_path / "wrong.toml", tmp_path / "out.zarr"
    path.write_text(TOML.replace(wrong["old"], wrong["new"], 1))
    assert run(["sweep", "run", str(path), "--out", str(out), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch("error: .+\\n(hint: .+\\n)?", printed.err)
    assert wrong["says"] in printed.err
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("grid_file"))


def test_a_scheduler_that_is_not_there_is_named(grid_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipejax.sweep.run.SCHEDULER_TIMEOUT", 0.5)
    address = "tcp://127.0.0.1:9"
    text = refused(capsys, grid_file, "--out", tmp_path / "o.zarr", "--scheduler", address)
    assert f"no scheduler answers at '{address}'" in text


def test_a_missing_file_is_named(tmp_path, capsys):
    assert "none.toml" in refused(capsys, tmp_path / "none.toml", "--out", tmp_path / "o.zarr")


def test_system_axes_in_every_unit():
    axes = read_system_axes(
        {
            "network": {"latency_us": [1, 2]},
            "compute": {"peak_PFLOP_per_s": {"from": 1, "to": 2, "points": 2}},
        },
        "system",
    )
    units = [(axis.name, axis.unit) for axis in axes]
    assert units == [("network.latency", "s"), ("compute.peak", "FLOP/s")]
    np.testing.assert_allclose(axes[0].values, [1e-6, 2e-6])
    np.testing.assert_allclose(axes[1].values, [1e15, 2e15])


# The store of a sweep: under kill -9 and damage, from a cluster, from several processes


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

        def tell(*progress, message=message):
            return message.append(progress)

        run_sweep(GRID, path, resume=True, on_progress=tell)
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


FORKS = (DATA / "sweep_forks.txt").read_text()


@pytest.fixture
def start():
    """Start a command; return its process and a function that waits for how it ended."""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", FORKS], **ends, text=True)

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


CLUSTER = (DATA / "sweep_cluster.txt").read_text()


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_gives_the_same_bytes(whole, grid_file, tmp_path):
    out = tmp_path / "cluster.zarr"
    line = [sys.executable, "-c", CLUSTER, out, grid_file]
    where = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "cwd": tmp_path}
    client = subprocess.run(line, capture_output=True, text=True, timeout=120, **where)
    assert client.returncode == 0, client.stderr
    result = json.loads(client.stdout)
    assert (result["not_evaluated"], result["evaluated_now"]) == (0, read_sweep(GRID).num_points)
    assert get_files(out) == get_files(whole)


def test_one_process_writes_at_a_time(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out.zarr")
    refused = pytest.raises(BlockingIOError, match="another process")
    with locked(tmp_path / "out.zarr", wait=False), refused:
        run_sweep(GRID, tmp_path / "out.zarr", resume=True)


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
    with pytest.raises(
        ValueError, match=r"was begun with code older, but this is .*would not match"
    ):
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
    refused = pytest.raises(FileExistsError, match="begin anew by --force")
    with refused, open_store(read_sweep(GRID), path):
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
    with pytest.raises(ValueError, match=r"holds notes\.txt, no part of a dataset"):
        run_sweep(small, store, replace=True)
    assert (store / "notes.txt").read_text() == "mine"
