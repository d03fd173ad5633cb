"""Files that commands write: refused before the work, never replaced unasked, never lost."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import xarray as xr
from daily import read_cases

import pipejax as pj
from pipejax.base.files import (
    DRAFT,
    atomic_write,
    check_writable,
    draft_folder,
    locked,
    provenance,
    write_file,
)
from pipejax.cli.app import run
from pipejax.cli.output.files import DATASET, Output

NO_TABLE = ["--schedule", "nonsense", "--workers", "2", "--microbatches", "3"]
LATE = "--stage-times", "F=1,B=2"
OUTPUTS = read_cases("OUTPUTS of test_outputs")


def loop(path):
    path.symlink_to(path)
    return path


def make_input(path, content=None):
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    return path


HOSTILE = {
    "there": (lambda tmp, end: make_input(tmp / f"x{end}", "precious"), "exists"),
    "a folder": (lambda tmp, end: make_input(tmp / f"x{end}"), "is a folder|exists"),
    "no folder": (lambda tmp, end: tmp / "no" / f"x{end}", "there is no folder"),
    "in a file": (lambda tmp, end: make_input(tmp / "file", "x") / f"x{end}", "Not a directory"),
    "proc": (lambda tmp, end: f"/proc/x{end}", "No such file"),
    "loop": (lambda tmp, end: loop(tmp / f"x{end}"), "symbolic links|exists"),
    "long": (lambda tmp, end: tmp / ("x" * 300 + end), "too long"),
    "zero": (lambda tmp, end: f"{tmp}/x\0{end}", "null byte"),
    "dash": (lambda tmp, end: "-", "requires an argument"),
    "empty": (lambda tmp, end: "", "must not be empty"),
}


def what_is_in(folder):
    return {str(path): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("command", "hostile"),
    [
        (command, hostile)
        for command in OUTPUTS
        for hostile in HOSTILE
        # a store that is there is looked into: test_sweep.py
        if not (command == "sweep" and hostile in ("there", "a folder"))
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(command, hostile, tmp_path, mistake):
    arguments, option, end = OUTPUTS[command]
    make, message = HOSTILE[hostile]
    path = make(tmp_path, end)
    before = what_is_in(tmp_path)
    line = mistake(*arguments, option, path)
    assert option in line
    assert re.search(message, line), line
    assert what_is_in(tmp_path) == before


def test_two_files_of_one_name_are_refused_before_the_work(tmp_path, mistake):
    (tmp_path / "link").symlink_to(tmp_path)
    pair = ("--out", tmp_path / "x.json", "--certificate", tmp_path / "link" / "x.json")
    arguments, _, _ = OUTPUTS["optimize"]
    assert "--out and --certificate name the same file" in mistake(*arguments, *pair)


@pytest.mark.parametrize("command", OUTPUTS)
def test_force_is_one_option_of_every_command_that_writes(command, tmp_path, call, mistake):
    arguments, option, end = OUTPUTS[command]
    code, text, _ = call(*arguments[: 2 if arguments[0] in ("sweep", "tune") else 1], "--help-all")
    assert code == 0
    assert "--force" in text
    if end != ".zarr":
        make_input(tmp_path / f"x{end}", "precious")
        line = mistake(*arguments, option, tmp_path / f"x{end}", "--force")
        assert "exists" not in line  # what comes next is wrong


def test_a_folder_that_is_no_dataset_of_ours_is_never_replaced(tmp_path, mistake):
    arguments, option, _ = OUTPUTS["jitter"]
    make_input(tmp_path / "runs.zarr")
    thesis = make_input(tmp_path / "runs.zarr" / "thesis.tex", "precious")
    line = mistake(*arguments, option, tmp_path / "runs.zarr", "--force")
    assert "never replaced" in line
    assert thesis.read_text() == "precious"


@contextlib.contextmanager
def file_size_limit(size):
    """Limit of `ulimit -f`: a file that grows beyond it is an error of the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_found_before_the_work(tmp_path, mistake):
    for command in ("export", "jitter"):
        arguments, option, end = OUTPUTS[command]
        with file_size_limit(100):
            line = mistake(*arguments, option, tmp_path / f"x{end}")
        assert line == f"error: {option} {tmp_path / f'x{end}'}: File too large\n"
    assert not list(tmp_path.iterdir())


ONE = ["--schedule", "gpipe", "--workers", "8", "--microbatches", "32"]


@pytest.mark.parametrize("json_too", [False, True])
def test_a_result_that_cannot_be_written_in_the_end_is_printed(json_too, tmp_path, call):
    path = make_input(tmp_path / "table.json", "precious")
    with file_size_limit(4096):
        code, out, err = call(
            "export", *ONE, "--format", "json", "--out", path, "--force", *["--json"] * json_too
        )
    assert (code, err) == (2, f"error: --out {path}: File too large\n")
    assert what_is_in(tmp_path) == {str(path): "precious"}
    text = out
    if json_too:
        result = json.loads(out)
        assert result["out"] is None
        text = result["unwritten"]
    again = tmp_path / "printed.json"
    again.write_text(text)
    assert pj.read_table(again).num_microbatches == 32


def test_a_file_that_comes_to_exist_during_the_work_stays(tmp_path, capsys):
    out = Output(tmp_path / "x.csv").check(DATASET._replace(suffixes=(".csv",), modules=()))
    out.save(lambda draft: (draft.write_text("ours"), (tmp_path / "x.csv").write_text("theirs")))
    assert out.as_json() == {"out": None}
    with pytest.raises(FileExistsError, match=r"x\.csv"):
        out.end(json=False)
    assert what_is_in(tmp_path) == {str(tmp_path / "x.csv"): "theirs"}


def dataset(size):
    return xr.Dataset({"x": ("n", np.random.default_rng(0).random(size))}, attrs=provenance())


def test_datasets_are_whole_or_not_there(tmp_path):
    out = Output(tmp_path / "x.zarr", force=True).check(DATASET)
    out.save_dataset(dataset(10))
    before = sorted(tmp_path.rglob("*"))
    with file_size_limit(4096):
        again = Output(out.path, force=True).check(DATASET)
        again.save_dataset(dataset(10_000))
    assert again.written is None
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(OSError, match="too large") as error:
        again.end(json=True)
    assert error.value.filename == str(out.path)
    again = Output(out.path, force=True).check(DATASET)
    again.save_dataset(dataset(20))
    assert again.written == out.path
    assert xr.open_zarr(out.path).sizes == {"n": 20}


def test_streams_are_written_to(call, tmp_path):
    code, out, err = call("export", *ONE, "--format", "json", "--out", "/dev/null")
    assert (code, err) == (0, "")
    assert "/dev/null" in out
    assert call("export", *ONE, "--format", "json", "--out", "/dev/full")[0] == 2


def test_long_names_have_room_for_their_drafts(tmp_path):
    for name in ("x" * 255, "é" * 127):
        check_writable(tmp_path / name)
        write_file(tmp_path / name, "x")
        assert (tmp_path / name).read_text() == "x"
    assert not list(tmp_path.glob(f"*{DRAFT}*"))


def test_a_dangling_link_is_followed(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "new.json")
    assert run(["export", *ONE, "--format", "json", "--out", str(tmp_path / "link.json")]) == 0
    assert os.path.islink(tmp_path / "link.json")
    assert pj.read_table(tmp_path / "new.json").num_workers == 8


# Files that commands write: whole or not there, whatever ends the writer


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("there", [None, "file", "folder"])
def test_what_ends_early_leaves_what_was_there(tmp_path, error, there):
    path = tmp_path / "out.json"
    if there == "file":
        path.write_text("old")
    elif there == "folder":
        path.mkdir()
        (path / "old").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error), atomic_write(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise error
    assert sorted(tmp_path.rglob("*")) == before
    assert there != "file" or path.read_text() == "old"


def test_files_and_folders_are_replaced_as_a_whole(tmp_path):
    path = tmp_path / "x[1].zarr"
    for content in ("old", "new"):
        with atomic_write(path) as draft:
            assert draft.name == path.name  # writers look at the suffix
            draft.mkdir()
            (draft / content).write_text(content)
        assert [file.name for file in path.iterdir()] == [content]
    file = tmp_path / "x.json"
    write_file(file, "old")
    file.chmod(0o640)
    (tmp_path / "link.json").symlink_to(file)
    write_file(tmp_path / "link.json", "a\nb")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"a\nb", 0o640)
    assert (tmp_path / "link.json").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "x.json", "x[1].zarr"]


def test_new_files_have_the_permissions_of_the_user(tmp_path):
    write_file(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_is_on_the_disk_before_it_is_seen(tmp_path, monkeypatch):
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append("replace"), replace(*paths)))
    write_file(tmp_path / "x", "x")
    assert seen == ["fsync", "replace"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe.json", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "through")
    reader.join()
    assert read == ["through"]
    assert not pipe.is_file()


def test_drafts_of_killed_processes_go_under_the_lock(tmp_path):
    code = f"""
import os, signal
from pipejax.base.files import atomic_write
with atomic_write({str(tmp_path / "a")!r}) as draft:
    draft.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (draft,) = tmp_path.glob(f"*{DRAFT}*")
    write_file(tmp_path / "b", "other", is_locked=True)
    with draft_folder(tmp_path / "a"):  # without the lock it may be somebody's
        assert draft.exists()
    write_file(tmp_path / "a", "whole", is_locked=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_lock_is_for_one_and_goes_with_its_holder(tmp_path):
    code = f"""
import os, pathlib, signal
from pipejax.base.files import locked
with locked(pathlib.Path({str(tmp_path)!r}), wait=True):
    print("held", flush=True)
    input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError, match="another process"), locked(tmp_path, wait=False):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path, wait=False):
        pass


TIMES = ["--stage-times", "F=1,B=2"]
SMALL = ["--schedule", "1f1b", "--workers", "2", "--microbatches", "3", *TIMES]
WRITES = read_cases("WRITES of test_outputs")


@pytest.mark.parametrize("command", WRITES)
def test_a_command_that_fails_while_it_writes_leaves_the_old_file(
    command, tmp_path, monkeypatch, capsys
):
    """The disk is full when the new file is to take its place, or while it is drawn."""
    arguments, name, step = WRITES[command]
    (tmp_path / name).write_text("precious")

    def full(*paths, **options):
        raise OSError(28, "No space left on device", str(tmp_path / name))

    if step == "replace":
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert run([*arguments, "--force", "--out", str(tmp_path / name)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"
