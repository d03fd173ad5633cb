"""Conventions of the command line: options, help, letters, units, tables, files of options."""

import inspect
import itertools
import json
import re
import shlex
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from daily import read_cases, with_cases

from pages.options import DIFFERENT_DEFAULTS, option_defaults, options_page
from pipejax.base.data_files import read_quantity
from pipejax.cli.app import COMMANDS, command_function
from pipejax.cli.options import catalogue, scenario, tables
from pipejax.cli.options.catalogue import (
    CATALOGUE,
    COMMAND_GROUPS,
    DETAILS,
    EXAMPLES,
    EXCEPTIONS,
    PANELS,
    flag,
    record,
)
from pipejax.cli.options.line import LineOptions, parse
from pipejax.cli.options.option import command_options, value_kinds
from pipejax.costs.model.workload_fields import WorkloadField
from pipejax.runtimes.formats import FORMATS

ONE = ["-s", "1f1b", "-P", "4", "-M", "8"]
TIMES = ["-T", "F=1,B=2"]
DATA = Path(__file__).parent / "data"
CONFIG = (DATA / "options.toml").read_text()
COMPLETED = json.loads((DATA / "completions.json").read_text())  # words by line


def options(name):
    """Options of a command: types of the value, default and help."""
    all_options = command_options(command_function(name))
    return {key: option for key, option in all_options.items() if key in CATALOGUE}


EVERY = {name: options(name) for name in COMMANDS}


def test_an_option_is_declared_once():
    assert Counter(name for panel in PANELS.values() for name in panel).most_common(1)[0][1] == 1
    letters = [option.short for option in CATALOGUE.values() if option.short]
    assert len(letters) == len(set(letters))
    assert set(CATALOGUE) == set().union(*EVERY.values())
    option = record("format", "export")
    assert (option.head, option.names) == ("|".join(FORMATS), (*FORMATS,))
    for command in ("sensitivity", "staleness", "validate"):  # which write nothing but a picture
        assert "figure" in EVERY[command]
        assert "out" not in EVERY[command]


def test_an_option_means_the_same_in_every_command():
    """Kind of value and line of help come from one record; parsers read one kind."""
    parsed = {}
    for name, parameters in EVERY.items():
        for key, option in parameters.items():
            meaning = record(key, name)
            assert option.help.casefold().startswith(meaning.head.casefold()), (name, key)
            if (name, key) not in EXCEPTIONS:
                parsed.setdefault(key, set()).update(value_kinds(option.kind))
    # a number, or several where a command takes several: these are read as a text
    several = {key: kinds for key, kinds in parsed.items() if len(kinds) > 1}
    assert all(kinds == {int, str} for kinds in several.values()), several
    assert set(several) == {"microbatches", "microbatch_size", "stages_per_worker", "zero"}


def test_an_option_has_one_default_but_for_reasons():
    differing = {name for name, spent in option_defaults().items() if len({*spent.values()}) > 1}
    assert differing == {*DIFFERENT_DEFAULTS}
    assert {name for _, name in EXCEPTIONS} <= {*CATALOGUE}


def test_an_option_may_stand_in_another_panel(call):
    _, out, _ = call("init", "--help-all")
    assert out.index("Model and system") < out.index("--from FILE") < out.index("Output")
    assert "Picture" not in out
    assert "\nPicture" not in call("compare", "--help-all")[1]
    assert "--from TIME" in call("show", "--help-all")[1]


def test_a_page_has_every_option_once():
    page = options_page()
    rows = re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)
    assert Counter(rows) == Counter(map(flag, CATALOGUE))
    exceptions = page[page.index("## Exceptions") :]
    for name in (*DIFFERENT_DEFAULTS, *(name for _, name in EXCEPTIONS)):
        assert f"`{flag(name)}`" in exceptions
    assert "- `--minibatch` of `plan` means: sequences per step of the whole job." in exceptions
    assert "| `--seed N` | Seed of the random numbers | 0 | " in page


def test_every_command_answers_a_question(call):
    assert sorted(itertools.chain(*COMMAND_GROUPS.values())) == sorted(COMMANDS)
    _, out, _ = call("--help-all")
    places = [out.index(title) for title in COMMAND_GROUPS]
    assert places == sorted(places)


def test_help_says_what_an_option_means_in_this_command(call):
    assert "Sequences per step of one pipeline" in call("evaluate", "--help-all")[1]
    for how in ("--help", "--help-all"):
        assert "Sequences per step of the whole job" in call("plan", how)[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen(name, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = call(*name.split(), "--help")
    lines = text.splitlines()
    assert (code, len(lines) <= 24, max(map(len, lines)) <= 80) == (0, True, True)
    named = set(re.findall(r"--[a-z][\w-]*", text))
    none, declared = inspect.Parameter.empty, EVERY[name].items()
    needed = {flag(key) for key, option in declared if option.default is none}
    assert named >= needed | {"--json", "--details", "--help-all"}
    assert "…" not in text
    assert call(*name.split(), "-h")[1] == text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_explains_every_option(name, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = call(*name.split(), "--help-all")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    plain = " ".join(text.split())
    for option in EVERY[name].values():
        assert " ".join(option.help.split()) in plain


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_a_command_line(name):
    program, *words = shlex.split(EXAMPLES[command_function(name).__name__])
    count = len(name.split())
    assert (program, *words[:count]) == ("pipejax", *name.split())
    words = words[count:]
    parse(command_function(name), words, LineOptions(name, COMMANDS))


def test_a_detail_is_of_an_option_of_its_command_or_record():
    commands = {command_function(name).__name__: command_function(name) for name in COMMANDS}
    modules = [sys.modules[command.__module__] for command in commands.values()]
    modules = [*modules, tables]
    records = {name: part for module in modules for name, part in vars(module).items()}
    for name, details in DETAILS.items():
        described = (records | commands)[name]
        assert {*details} <= {*inspect.signature(described).parameters} & {*CATALOGUE}, name


SPELLED = read_cases("spellings of options")


@pytest.mark.parametrize("how", SPELLED)
def test_options_are_spelled_in_several_ways(call, how):
    code, out, err = call("evaluate", *SPELLED[how], "-T", "F=1,B=2")
    assert (code, err) == (0, "")
    assert json.loads(out)["makespan"] == 33.0


def test_none_is_a_value_like_others():
    """The parser takes none and null for an option that is not there, where it may."""

    def arguments(name, *words):
        return parse(command_function(name), words, LineOptions(name, COMMANDS)).arguments

    run = arguments("evaluate", "--recompute", "none", "--comm", "null")["run"]
    assert (run.recompute, run.comm) == ("none", "null")
    stored = arguments("optimize", "--memory-limit", "3", "--store", "none")["stored"]
    assert stored.store == Path("none")
    shown = arguments("sweep show", "none", "--where", "none", "--out", "none")
    assert (shown["dataset"], shown["where"]) == (Path("none"), ["none"])
    assert shown["out"].path == Path("none")


def configured(folder, text, suffix=".toml"):
    path = folder / f"options{suffix}"
    path.write_text(text)
    return ["--config", str(path)]


def test_options_come_from_a_file(call, tmp_path):
    code, out, err = call("evaluate", *configured(tmp_path, CONFIG))
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["makespan"] == pytest.approx(11 * 3 + 16 * 0.5)
    assert [corner["name"] for corner in result["corners"]] == ["nominal", "slow", "hot"]
    again = call("evaluate", *configured(tmp_path, CONFIG), "-P", "2", "--comm", "0")[1]
    assert (json.loads(again)["workers"], json.loads(again)["makespan"]) == (2, 27.0)
    other = call("evaluate", *configured(tmp_path, CONFIG), "--corner", "cold:compute*0.5")[1]
    assert [corner["name"] for corner in json.loads(other)["corners"]] == ["nominal", "cold"]
    as_json = '{"schedule": "1f1b", "workers": 4, "microbatches": 8, "stage_times": "F=1,B=2"}'
    code, out, err = call("evaluate", *configured(tmp_path, as_json, ".json"), "-j")
    assert json.loads(out)["makespan"] == 33.0


@with_cases("text code", *read_cases("test_assertions_come_from_a_file"))
def test_assertions_come_from_a_file(call, tmp_path, text, code):
    line = ("-s", "1f1b", "-P", 4, "-M", 8, "-T", "F=1,B=2")
    assert call("evaluate", *line, *configured(tmp_path, text))[0] == code


@pytest.mark.parametrize("micro", ["u", "\u00b5", "\u03bc"])
def test_micro_has_a_sign_and_a_greek_letter(answer, micro):
    line = ("evaluate", "-s", "1f1b", "-P", 4, "-M", 8, "-T", f"F=1{micro}s,B=2{micro}s")
    assert answer(*line)["makespan"] == pytest.approx(33e-6, rel=1e-12)


SAME = {  # values with units, and as plain numbers
    "times": (["-T", "F=1ms,B=2ms"], ["-T", "F=0.001,B=0.002"]),
    "times of workers": (["-W", "F=1000us,B=2 ms"], ["-W", "F=1e-3,B=2e-3"]),
    "a message": ([*TIMES, "--comm", "40us"], [*TIMES, "--comm", "0.00004"]),
    "latency": ([*TIMES, "--latency", "2min"], [*TIMES, "--latency", "120"]),
    "transmit": ([*TIMES, "--transmit", "7ns"], [*TIMES, "--transmit", "7e-9"]),
    "target": ([*TIMES, "--target", "40000ms"], [*TIMES, "--target", "40"]),
}


@pytest.mark.parametrize("what", SAME)
def test_values_may_have_units(answer, what):
    with_unit, plain = (answer("evaluate", *ONE, *arguments) for arguments in SAME[what])
    assert with_unit == plain


@with_cases("options bare", *read_cases("test_a_number_beside_times_with_units_gives_a_warning"))
def test_a_number_beside_times_with_units_gives_a_warning(call, options, bare):
    code, _, err = call("evaluate", *ONE, *options, "--json")
    assert (code, f": {bare} has no unit and is read as seconds" in err) == (0, True)


def test_a_field_of_a_workload_may_be_a_time(monkeypatch):
    """Its kind says how its option is read and described, and which values it has."""
    field = WorkloadField("seconds", "time to write metrics")
    monkeypatch.setattr(scenario, "WORKLOAD_FIELDS", {"metrics": field})
    options = types.SimpleNamespace(metrics="40ms")
    assert scenario.workload_fields(options, ["metrics"]) == {"metrics": 0.04}
    assert catalogue._workload_option(field).kind == catalogue.TIME
    with pytest.raises(ValueError, match="metrics must be a"):
        field.values.read(-1.0, "metrics")


def test_offloads_take_what_an_option_says_in_every_command(answer):
    """The schedule is planned for that time, and runs with it."""
    arguments = ["-s", "ada-offload", *ONE[2:], "--memory-limit", "2"]
    by_option = answer("evaluate", *arguments, "-T", "F=1,I=1,W=1", "--offload", "500ms")
    assert by_option == answer("evaluate", *arguments, "-T", "F=1,I=1,W=1,O=0.5")
    slow = answer("evaluate", *arguments, "-T", "F=1,I=1,W=1,O=2")
    assert by_option["makespan"] < slow["makespan"]


def test_of_several_schedules_one_uses_the_time(answer):
    sizes = ["-P", "2", "-M", "2"]
    arguments = [*sizes, "-T", "F=1,I=1,W=1", "--offload", "1"]
    for command in ("compare", "jitter", "show"):
        more = ["--samples", "2"] if command == "jitter" else []
        answer(command, "-S", "1f1b,pipe-offload", *arguments, *more)
    answer("compare", "--diff", "-S", "pipe-offload,1f1b", *arguments)
    late = [*sizes, "-T", "F=1,I=1,W=1,O=1000"]  # planned for it: nothing is worth an offload
    answer("evaluate", "-s", "ada-offload", *late)


def test_a_memory_limit_is_activations_in_every_command(answer):
    arguments = ["evaluate", "-s", "zero-bubble", *ONE[2:]]
    limits = [], ["--memory-limit", "3"], ["--memory-limit", "3,4,4,4"]
    runs = [answer(*arguments, *TIMES, *limit) for limit in limits]
    peaks = [max(run["activation_memory"]["peak"]) for run in runs]
    assert peaks[0] > 3 >= peaks[1] == peaks[2]  # of one each, the least


def test_a_box_of_parameters_may_have_units(answer):
    built = [answer("formula", *ONE, "--box", box) for box in ("F=1ms:2ms", "F=0.001:0.002")]
    assert built[0]["facets"] == built[1]["facets"]


@with_cases("text dimension value", *read_cases("quantities in SI units"))
def test_a_quantity_is_read_in_si_units(text, dimension, value):
    assert read_quantity(text, dimension, "--any") == value


@pytest.mark.parametrize("text", ["1sec", "3PB", "1e", "-1ms", "1_0s", "1.2.3s", "٣s", "1ms/s"])
def test_a_unit_that_is_unknown_is_named_with_those_that_are(text):
    with pytest.raises(ValueError, match=r"--any.*(known are ns, us, .*ms, s|at least 0 before)"):
        read_quantity(text, "s", "--any")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_completes_what_there_is(call, shell):
    code, script, _ = call("--completion", shell)
    assert code == 0
    first_words = {name.split()[0] for name in COMMANDS}
    for word in (*first_words, "zb-h1", "llama3-70b", "h100", "rendezvous", "chrome-trace"):
        assert word in script
    if shell == "bash":
        assert "--planned-comm" in script


def test_bash_completes(call, tmp_path):
    (tmp_path / "mine.csv").touch()
    (tmp_path / "script").write_text(call("--completion", "bash")[1])
    asked = 'COMP_WORDS=({}); COMP_CWORD={}; _pipejax; echo "${{COMPREPLY[*]}}"'
    ask = [asked.format(line, len(line.split()) - 1) for line in COMPLETED]
    how = {"capture_output": True, "text": True, "cwd": tmp_path}
    done = subprocess.run(["bash", "-c", "\n".join(["source ./script", *ask])], **how)
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == list(COMPLETED.values())


def test_a_command_of_two_words_lists_its_second_words(call):
    code, out, _ = call("sweep", "--help")
    assert code == 0
    listed = [line.split("  ")[0] for line in out.splitlines() if line.startswith("sweep")]
    assert listed == ["sweep run", "sweep show"]


@pytest.mark.parametrize("command", ["tune layers", "explain", "evaluate"])
def test_details_repeat_no_line_of_the_first_screen(call, command):
    run = "-s 1f1b -P 4 -M 4 -m llama3-8b -y h100 --minibatch 4 --details"
    code, out, _ = call(*command.split(), *run.split())
    lines = [line for line in out.splitlines() if re.match(r"Megatron-LM: --", line)]
    assert code == 0
    assert len(lines) == len({*lines})
