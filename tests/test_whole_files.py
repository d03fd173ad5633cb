"""Files that commands write: whole or not there, whatever ends the writer."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from pipejax.base.files import DRAFT, atomic_write, draft_folder, locked, write_file
from pipejax.cli.app import run


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


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_file(tmp_path / "no" / "x.json", "x")
    assert error.value.filename == str(tmp_path / "no" / "x.json")


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
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError, match="another process"), locked(tmp_path, wait=False):
        pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path, wait=False):
        pass


TIMES = ["--stage-times", "F=1,B=2"]
ONE = ["--schedule", "1f1b", "--workers", "2", "--microbatches", "3", *TIMES]
OUTPUTS = {
    "export": (["export", *ONE, "--format", "json"], "x.json", "replace"),
    "order": (
        ["tune", "messages", *ONE, "--comm", "0.1", "--time-limit", "0.1"],
        "x.csv",
        "replace",
    ),
    "show": (["show", *ONE], "x.html", "replace"),
    "show svg": (["show", *ONE], "x.svg", "savefig"),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_a_command_that_fails_while_it_writes_leaves_the_old_file(
    command, tmp_path, monkeypatch, capsys
):
    """The disk is full when the new file is to take its place, or while it is drawn."""
    arguments, name, step = OUTPUTS[command]
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
