"""The command line: what it prints, and that a mistake is one clear line with exit code 2."""

import inspect
import itertools
import json
import shlex
import subprocess
import sys
import time

import pytest
from daily import daily, read_cases, with_cases
from legal_sizes import SLICED, at_least, build

import pipejax as pj
from pipejax.analysis.step.step_report import fitting_change
from pipejax.cli.app import COMMANDS, command_function, run, summary
from pipejax.cli.options.option import command_options, parser
from pipejax.schedules import REGISTRY

ONE = ["-s", "1f1b", "-P", "4", "-M", "8"]
TIMES = ["--stage-times", "F=1,B=2"]
TWO_PIPES = ("chimera", "chimera-asymmetric", "bitpipe", "dualpipe")
CROSSED = b"0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
CROSSED += b"1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
GPT3 = ("-m", "gpt3-175b", "-y", "h100", "--tensor-parallel", 8)
SIZES = ("-s", "1f1b", "-P", 8, "-M", 32, "--minibatch", 32)


def test_evaluate_reads_tables_and_costs(answer, data, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(
        '{"unit": "seconds", "F": 1.0, "I": 1.5, "W": 0.7, '
        '"message": {"latency": 0.05, "transmit": 0.9}}'
    )
    table = ["--table", data / "1F1B_4_8.comms.csv", "--costs", costs]
    assert answer("evaluate", *table)["makespan"] == pytest.approx(50.4)
    for queues, expected in (("worker", 53.2), ("pair", 52.3), ("direction", 50.4)):
        link = ["--link", "rendezvous", "--queues", queues]
        assert answer("evaluate", *table, *link)["makespan"] == pytest.approx(expected)


def test_the_program_alone_names_the_first_commands_and_its_version(call):
    code, out, _ = call()
    assert (code, "more commands: pipejax --help-all" in out) == (0, True)
    assert call("--version") == (0, f"pipejax {pj.__version__}\n", "")


def test_models_and_systems_are_listed_with_their_sizes(answer, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = {row["name"]: row for row in answer("schedules")}
    assert list(listed) == list(pj.schedules.names())
    assert all({"name", "phases", "legal", "source"} <= set(row) for row in listed.values())
    models = {row["name"]: row for row in answer("schedules", "--models")}
    assert models["llama3-8b"]["parameters"] == pj.load_model("llama3-8b").parameters
    assert models["mixtral-8x7b"]["experts"] == 8
    systems = {row["name"]: row for row in answer("schedules", "--systems")}
    assert (systems["h100"]["peak_flops"], systems["h100"]["node_bandwidth"]) == (989e12, 450e9)
    for option, words in (("--models", ["8.03", "671"]), ("--systems", ["989", "85.52", "3.35"])):
        _, out, _ = call("schedules", option)
        assert all(f" {word} " in out for word in words)
        assert out.count("┏") == 1  # one table, without paragraphs
        assert "arXiv" not in out
        assert ",source\n" in call("schedules", option, "-f", "csv")[1]


def test_brackets_in_names_are_printed_as_they_are(call, tmp_path):
    table = tmp_path / r"mine[red]$\frac$.csv"
    table.write_text("0F0,0B0\n")
    out = tmp_path / "x[bold].svg"
    _, text, _ = call("show", "--table", table, "--out", out)
    assert "x[bold].svg" in text
    assert out.exists()
    for command in (["show"], ["evaluate", *TIMES]):
        assert "mine[red]" in call(*command, "--table", table)[1]


@with_cases("workers stragglers says", *read_cases("equally busy workers"))
def test_equally_busy_workers_are_named_together(call, workers, stragglers, says):
    run = ["evaluate", "-s", "1f1b", "-P", workers, "-M", "8", "-T", "F=1,B=2"]
    _, out, _ = call(*run, "--stragglers", stragglers)
    assert says in out.splitlines()[0]


def test_schedules_without_any_time_are_equally_fast(call):
    _, out, _ = call("compare", "-S", "1f1b,gpipe", "-P", "4", "-M", "8", "-T", "F=0,B=0")
    assert out.startswith("1f1b and gpipe are fastest: 0 s")


def test_tiny_times_are_drawn_as_any(call):
    shapes = []
    for cost in ("1", "1e-310", "5e-324"):
        code, out, err = call("show", *ONE, "--stage-times", f"F={cost},B={cost}", "--width", "90")
        assert (code, err) == (0, "")
        shapes.append(out.splitlines()[1:])
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("name", daily(REGISTRY, always=3))
def test_export_round_trips(answer, mistake, name, tmp_path):
    for fmt, suffix in (("torch-csv", "csv"), ("json", "json")):
        out = tmp_path / f"table.{suffix}"
        arguments = ["--schedule", name, "--workers", 4, "--microbatches", at_least(name, 4, 4)]
        times = ["--comm", "0.3", "--stage-times", "F=1,B=2"]  # some are planned for them
        planned = [*times[:-1], times[-1] + (",O=0.5" if "offload" in REGISTRY[name].takes else "")]
        written = "export", *arguments, *planned, "--format", fmt, "--out", out
        if fmt == "torch-csv" and name in SLICED:
            assert "usual ops and rules alone" in mistake(*written)
            continue
        if fmt == "torch-csv" and name in TWO_PIPES:
            assert "a stage must be on one rank" in mistake(*written)
            continue
        answer(*written)
        built = answer("evaluate", *arguments, *planned)
        offloads = pj.read_table(out).offloads
        read = answer("evaluate", "--table", out, *(planned if offloads else times))
        assert read["makespan"] == built["makespan"]


@pytest.mark.parametrize("command", ["show", "show on a page", "jitter", "compare --diff"])
def test_a_table_of_several_that_cannot_run_is_named(mistake, command, tmp_path):
    good = tmp_path / "good.csv"
    pj.write_table(build("gpipe", 2, 2), good)
    (tmp_path / "crossed.csv").write_bytes(CROSSED)
    out = ["--out", tmp_path / "x.html"] if "page" in command else []
    words = command.removesuffix(" on a page").split()
    error = mistake(*words, "-S", tmp_path, *TIMES, "--link", "rendezvous", *out)
    assert "crossed.csv: deadlock" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is(command):
    for name, option in command_options(command_function(command)).items():
        assert option.help, name
        assert not option.help.startswith("as `"), name  # what is said elsewhere is said here too
    arguments = parser(command_function(command)).assemble_argument_collection()
    assert not [argument.name for argument in arguments if argument.negatives]  # no --no-...


def test_the_list_of_commands_says_what_they_say():
    for name in COMMANDS:
        about = inspect.getdoc(command_function(name)).partition("\n\n")[0]
        assert summary(name) == " ".join(about.split())


def test_a_cold_process_answers_and_fails_cleanly(tmp_path):
    command = [sys.executable, "-c", "from pipejax.cli import main; main()", "evaluate", *ONE]
    began = time.perf_counter()
    good = subprocess.run([*command, *TIMES, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(good.stdout)["makespan"] == 33.0
    assert time.perf_counter() - began < 60  # a hang, not a speed, is what this catches
    bad = subprocess.run([*command, "--stage-times", "F=x"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr


# files to begin with: each is accepted as it is by the command that its report names
@pytest.mark.parametrize("kind", ["model", "system"])
def test_a_copy_evaluates_as_it_is(kind, tmp_path, monkeypatch, answer, capsys):
    monkeypatch.chdir(tmp_path)
    built = answer("init", kind)
    assert (tmp_path / built["out"]).exists()
    program, *arguments = shlex.split(built["used_by"])
    assert program == "pipejax"
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


def test_copies_keep_numbers_and_source(tmp_path, answer, call):
    path = tmp_path / "ours.json"
    assert answer("init", "system", "--system", "B200", "--out", path)["out"] == str(path)
    ours, b200 = pj.load_system(path), pj.load_system("b200")
    assert (ours.name, ours.peak_flops, ours.network) == ("ours", b200.peak_flops, b200.network)
    assert ours.source == f"A copy of b200, to be changed. {b200.source}"
    code, _, err = call("init", "system", "--out", path)
    assert (code, "exists" in err) == (2, True)
    code, out, _ = call("init", "model", "--model", "gpt-22b", "--out", path, "--force")
    assert code == 0
    assert pj.load_model(path).layers == pj.load_model("gpt-22b").layers
    for word in ("wrote", "next: pipejax evaluate", "--model"):
        assert word in out


# a run that does not fit says so first, with the least change that makes it fit
def test_what_does_not_fit_is_said_first_and_with_what_it_would(call, answer):
    code, shown, _ = call("evaluate", *SIZES, *GPT3)
    assert code == 0
    need = "worker 0 needs 100.9 of 83.5 GB; with --sequence-parallel it would"
    assert shown.splitlines()[0].endswith(f"; does not fit: {need}")
    result = answer("evaluate", *SIZES, *GPT3)
    assert (result["fits"], result["fits_with"]) == (False, {"sequence_parallel": True})
    (line,) = result["next"]
    again = answer(*line.split()[1:])
    assert again["fits"]
    assert max(again["memory_bytes"]) <= again["memory_room"] < max(result["memory_bytes"])
    assert {"fits_with", "next"}.isdisjoint(again)
    assert "fit" not in call("evaluate", *SIZES, *GPT3, "--sequence-parallel")[1]


def test_what_nothing_makes_fit_is_said(call, answer):
    few = ("-s", "1f1b", "-P", 2, "-M", 32, "--minibatch", 32, *GPT3)
    code, shown, _ = call("evaluate", *few)
    assert code == 0
    assert "231.3 of 83.5 GB; no --sequence-parallel, --zero or --recompute makes it fit" in shown
    assert answer("evaluate", *few)["fits_with"] is None


@pytest.mark.parametrize("share", [0.99, 0.9, 0.8, 0.6, 0.4, 0.2, 0.01])
def test_the_least_dear_change_is_taken(share):
    """As one tries it by hand, in the order of what it costs."""
    table = build("1f1b", 4, 8)
    options = {"minibatch": 8, "tensor_parallel": 2, "data_parallel": 2}
    model = pj.load_model("gpt-22b")

    def need(**change):
        return pj.memory_bytes(pj.Workload(model, **options, **change), table).max()

    room = share * need()
    change = fitting_change(pj.Workload(model, **options), table, room)
    dear = {("zero", 1): 1, ("recompute", "selective"): 2, ("zero", 2): 4}
    dear |= {("recompute", "full"): 8, ("zero", 3): 16}
    zeros, levels, sequences = (0, 1, 2, 3), ("none", "selective", "full"), (False, True)
    names, costs = ("zero", "recompute", "sequence_parallel"), []
    for values in itertools.product(zeros, levels, sequences):
        changes = dict(zip(names, values, strict=True))
        costs += [sum(dear.get(x, 0) for x in changes.items())] if need(**changes) <= room else []
    if not costs:
        assert change is None
        return
    assert need(**change) <= room
    assert sum(dear.get(item, 0) for item in change.items()) == min(costs)
