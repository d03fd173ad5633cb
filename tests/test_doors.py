"""What stands at the doors: options that were given, names, types of arguments."""

import re

import pytest

import pipejax as pj
from pipejax.base.checks import known_as, one_of

ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
TIMES = ["--stage-times", "F=1,B=2"]
MODEL = ["--model", "gpt-22b", "--system", "h100", "--minibatch", "8"]
GIVEN = {
    "an option twice": ([*ONE, *TIMES, "--workers", "2"], "--workers is given twice: 4 and 2"),
    "a flag twice": ([*ONE, *TIMES, "--slack", "--slack"], "--slack is given twice\n"),
    "twice, once with =": ([*ONE, *TIMES, "--workers=2"], "--workers is given twice: 4 and 2"),
    "nothing": (["--table", "", *TIMES], "--table must not be empty"),
    "nothing behind =": (["--table=", *TIMES], "--table must not be empty"),
    "other digits": ([*ONE[:-1], "٣", *TIMES], "--microbatches must be .* 0 to 9, got '٣'"),
    "an underscore": ([*ONE[:-1], "1_0", *TIMES], "--microbatches must be .* 0 to 9, got '1_0'"),
    "other digits of seconds": ([*ONE, *TIMES, "--comm", "٣"], "--comm must be .* got '٣'"),
    "queues of what has none": ([*ONE, *TIMES, "--queues", "pair"], "--queues has no effect"),
    "a split over one": ([*ONE, *MODEL, "--sequence-parallel"], "--sequence-parallel has no eff"),
    "an argument of the library": (
        ["--schedule", "zero-bubble", *ONE[2:], *TIMES, "--memory-limit", "nan"],
        "--memory-limit must be",
    ),
    "an unknown name": (["--schedule", "1f1", *ONE[2:], *TIMES], "--schedule: .* mean 1f1b[?]"),
    "a file": (["--table", "no.csv", *TIMES], "--table no.csv: No such file"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_an_error_names_the_option(call, what):
    arguments, message = GIVEN[what]
    code, out, err = call("evaluate", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err), err


def test_a_share_is_checked_where_nothing_reads_it(mistake):
    arguments = ["order", *ONE, *TIMES, "--weight-share"]
    assert "--weight-share must be a number from 0 to 1, got nan" in mistake(*arguments, "nan")
    assert "--weight-share: 1f1b takes no weight share" in mistake(*arguments, "0.5")


@pytest.mark.compiles
def test_tuning_keeps_within_the_memory_of_the_system(mistake):
    planned = ["--schedule", "zero-bubble", "--workers", "4"]
    assert "--memory-limit does not" in mistake("tune", *planned, *MODEL, "--memory-limit", "2")


def test_names_fold_case(answer):
    named = ["--schedule", "1F1B", *ONE[2:], *TIMES, "--link", "Queued"]
    assert answer("evaluate", *named)["link"] == "queued"
    assert pj.schedules.build("ZB-h1", num_workers=2, num_microbatches=2).name == "zb-h1"
    assert pj.load_model("Llama3-70B").layers == 80
    assert pj.load_system("H100").name == "h100"
    assert pj.Links("Rendezvous", queues="PAIR") == pj.Links("rendezvous", queues="pair")
    assert pj.Distribution("Gamma", 0.1) == pj.Distribution("gamma", 0.1)
    assert pj.Workload(pj.load_model("gpt-22b"), 8, recompute="FULL").recompute == "full"


def test_the_nearest_name_is_proposed():
    known = ("delay", "queued", "Blocking")
    assert known_as("blocking", known, "link model") == "Blocking"
    with pytest.raises(ValueError, match=r"unknown link model 'blokcing': .*; did you mean Block"):
        known_as("blokcing", known, "link model")
    with pytest.raises(ValueError, match=r"got 'queue'; did you mean queued[?]$"):
        one_of("queue", known, "link")
    with pytest.raises(ValueError, match=r"got 'xyz'$"):  # nothing is near
        one_of("xyz", known, "link")
    with pytest.raises(ValueError, match=r"got None$"):
        one_of(None, known, "link")
