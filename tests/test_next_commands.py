"""Command lines and files of options that commands end in."""

import shlex
import tomllib

import pytest

from pipejax.cli.options.line import command_line, config_text, written, written_but
from pipejax.cli.options.option import parse_share
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.report import printing

MODEL = ("-m", "gpt-22b", "-y", "h100", "--minibatch", 8, "--tensor-parallel", 8)


def test_what_was_written_is_written_again():
    with printing(None, options={"workers": 4, "link": "queued", "json": True}):
        with printing(None, options={"table": "a b.csv", "no_store": True}):
            assert written_but() == {"table": "a b.csv", "no_store": True}
        assert written_but() == {"workers": 4, "link": "queued"}
        assert written("link", "queues") == {"link": "queued"}
        line = command_line("tune messages", written_but() | {"no_store": True, "out": "a b.csv"})
    assert line == "pipejax tune messages --workers 4 --link queued --no-store --out 'a b.csv'"
    assert written_but() == {}
    assert command_line("trace", {"files": ["a b", "c"], "against": ["d", "e"]}) == (
        "pipejax trace 'a b' c --against d --against e"
    )


def test_a_file_of_options_is_one_of_config():
    text = config_text({"stages_per_worker": 2, "model": 'a"b.json', "sequence_parallel": True})
    read = {"stages-per-worker": 2, "model": 'a"b.json', "sequence-parallel": True}
    assert tomllib.loads(text) == read


@pytest.mark.parametrize(("json", "expected"), [(False, "next: pipejax x\n"), (True, '"next"')])
def test_an_answer_ends_in_them(json, expected, capsys):
    with printing(None, json=json):
        Answer({"a": 1}, next=("pipejax x",)).show()
        assert expected in capsys.readouterr().out
        Answer({"a": 1}).show()
        assert "next" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "share"), [("0.1", 0.1), ("10%", 0.1), ("2.5 %", 0.025), ("1", 1)]
)
def test_shares(text, share):
    assert parse_share(text, "--gap") == pytest.approx(share, rel=1e-15)


@pytest.mark.parametrize("text", ["-1%", "101%", "1.1", "%", "10%%", "nan", ""])
def test_what_is_no_share(text):
    with pytest.raises(ValueError, match="--gap must be a share from 0 to 1"):
        parse_share(text, "--gap")


def test_tuned_sizes_end_in_what_launchers_are_told_and_a_page(answer, call, tmp_path):
    line = ("tune", "size", "-s", "interleaved-1f1b", "-P", 2, "-V", 2, *MODEL)
    result = answer(*line, "--method", "exhaustive")
    best, message = result["best"], result["launch"]["Megatron-LM"]["options"]
    assert message["micro-batch-size"] == best["microbatch_size"]
    assert message["num-virtual-stages-per-pipeline-rank"] == 2
    (page,) = result["next"]
    out = tmp_path / "size.html"
    assert call(*shlex.split(page)[1:-1], out)[0] == 0
    assert "<canvas" in out.read_text()


def test_sequences_of_another_length(answer, mistake):
    sizes = ("evaluate", "-s", "1f1b", "-P", 4, "-M", 8)
    short, long = (answer(*sizes, *MODEL, *more) for more in ((), ("--sequence", 4096)))
    assert long["step_time"] > short["step_time"]
    assert "--sequence needs --model" in mistake(*sizes, "-T", "F=1,B=2", "--sequence", 4096)
