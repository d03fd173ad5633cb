"""Schemas of `--json`: every answer keeps its own, a changed key is named, units reach `--assert`."""

import copy
import json
import re
import shlex
import tomllib

import host_runs
import jsonschema
import pytest
from answers import check_schema
from daily import read_cases, with_cases
from test_golden import CLOCK, GOLDEN

import pipejax as pj
from pages.schemas import (
    KEYS,
    VERSION,
    add_outputs,
    described,
    lookups,
    promises,
    undescribed,
    union,
    value_schema,
    vocabulary,
)
from pipejax.cli.app import COMMANDS
from pipejax.cli.options.assertions import FOLDER, parse_assertions, read_schema, verdicts

RUN = shlex.split("evaluate -s 1f1b -P 4 -M 8 -T F=1ms,B=2ms")  # 1F1B: (P - 1 + M) (F + B) = 33 ms
ANSWERED = json.loads(GOLDEN.read_text())


def uncut(value):
    """A recorded answer without the counts that stand for what is cut from long lists."""
    if isinstance(value, dict):
        return {key: uncut(item) for key, item in value.items()}
    if isinstance(value, list):
        is_cut = value and isinstance(value[-1], str) and value[-1].endswith(" in all")
        return [uncut(item) for item in (value[:-1] if is_cut else value)]
    return value


def test_every_command_has_a_schema_of_this_version():
    assert {path.stem for path in FOLDER.glob("*.json")} == {c.replace(" ", "_") for c in COMMANDS}
    for command in COMMANDS:
        schema = read_schema(command)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["version"] == VERSION


@pytest.mark.parametrize("system", ["fast_nw_fast_cp", "mid_nw_fast_cp", "mi300x", "a100-vtrain"])
def test_what_some_machines_lack_is_promised_of_none(answer, system):
    size = "-m", "llama3-8b", "-y", system, "--minibatch", 8
    run = answer("evaluate", "-s", "1f1b", "-P", 4, "-M", 8, *size)
    reserve = float(pj.load_system(system).memory_reserve)
    assert ("reserve" in run["memory_parts"]) == (reserve > 0)
    best = answer("plan", *size, "--gpus", 8)["best"]
    assert (best["evidence"] is None) == (system != "a100-vtrain")  # nobody measured runs there


@pytest.mark.parametrize("command", [*COMMANDS])
def test_the_recorded_answers_keep_their_schemas(command):
    schema = read_schema(command)
    answer = uncut(ANSWERED[command])
    needed = schema.get("required", ()) if isinstance(answer, dict) else ()
    clock = [key for key in needed if key not in answer]
    problems = [
        error.message
        for error in jsonschema.Draft202012Validator(schema).iter_errors(answer)
        if error.validator != "required"  # what a clock says is not recorded
    ]
    assert problems == []
    assert {*clock} <= CLOCK


@pytest.mark.parametrize("command", [*COMMANDS])
def test_a_schema_written_again_is_the_same(command):
    schema = read_schema(command)
    again = described(undescribed(schema), (command,))
    assert json.dumps(again) == json.dumps({key: schema[key] for key in again})  # order, too


def test_the_schemas_have_all_outputs():
    schemas = {command: undescribed(read_schema(command)) for command in COMMANDS}
    before = copy.deepcopy(schemas)
    add_outputs(schemas)
    assert schemas == before, "run python -m pages.schemas"


@pytest.mark.parametrize(("old", "new"), [("makespan", "duration"), ("busy", "busy_seconds")])
def test_a_renamed_key_is_named(answer, old, new):
    result = answer(*RUN)
    check_schema("evaluate", result)
    result[new] = result.pop(old)
    with pytest.raises(AssertionError, match=f"{old}|{new}"):
        check_schema("evaluate", result)


@pytest.mark.parametrize("line", ["--link rendezvous --comm 1ms --eager-below 2ms"])
def test_rare_keys_are_in_the_schemas(answer, line):
    assert answer(*RUN, *shlex.split(line))


def test_budgets_of_devices_are_in_the_schema(answer, tmp_path):
    run, _ = host_runs.host_run(pj.schedules.build("1f1b", num_workers=2, num_microbatches=4))
    host_runs.write_nsight(tmp_path, run)
    budget = answer("trace", tmp_path, "--schedules", "1f1b")["budgets"][0]
    assert {"compute", "exposed", "blocking", "launch_starved", "dependency_stalled"} <= {*budget}


def test_a_version_keeps_its_promises():
    old = value_schema({"a": 1, "b": [0.5], "c": {"d": "x"}}, ("evaluate",))
    fewer = union(old, value_schema({"a": None, "b": [0.5], "c": {}}, ("evaluate",)))
    assert promises(old) - promises(fewer) == {"the answer.a is integer", "the answer.c has d"}
    answer = {"a": 1, "b": [], "c": {"d": "x", "e": 1}, "f": 1}
    assert promises(old) <= promises(union(old, value_schema(answer, ("evaluate",))))


def test_every_meaning_is_of_a_key_that_is_there():
    used = set()

    def walk(schema, names):
        used.update(lookups(names), lookups(tuple(name for name in names if name != "*")))
        for key in ("items", "additionalProperties"):
            if schema.get(key):
                walk(schema[key], names if key == "items" else (*names, "*"))
        for key, inner in schema.get("properties", {}).items():
            walk(inner, (*names, key))

    for command in COMMANDS:
        walk(undescribed(read_schema(command)), (command,))
    listed = vocabulary()
    assert {*listed["keys"], *listed["maps"], *listed["opaque"], *listed["open"]} - used == set()


def test_units_are_those_of_the_documentation():
    header = KEYS.read_text().partition("\n\n")[0]
    keys = tomllib.loads(KEYS.read_text())["keys"]
    units = {entry[0] for entry in keys.values() if isinstance(entry, list)}
    words = [rf"(?<![\w/]){re.escape(unit)}(?![\w/])" for unit in units if unit]
    assert all(re.search(word, header) for word in words)


def test_the_command_prints_it(answer, call):
    assert [entry["command"] for entry in answer("schema")] == [*COMMANDS]
    code, out, err = call("schema", "sweep", "show")
    assert (code, err) == (0, "")
    assert json.loads(out) == read_schema("sweep show")
    code, out, _ = call("schema")
    first, *lines = out.splitlines()
    assert (code, first.split()[0]) == (0, str(len(COMMANDS)))
    names = [line[2:].partition("  ")[0] for line in lines if line[2] != " "]  # a phrase may wrap
    assert names == [*COMMANDS]


HOLDING = read_cases("conditions that hold")


def test_conditions_that_hold(call):
    options = [word for text in HOLDING for word in ("--assert", text)]
    code, out, err = call(*RUN, *options, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["makespan"] == pytest.approx(0.033)


@with_cases("text message", *read_cases("conditions that fail"))
def test_conditions_that_fail(call, text, message):
    code, out, err = call(*RUN, "--assert", text, "--assert", "makespan < 1 h")
    verdict, answer = out.splitlines()[:2]
    assert verdict == "assert: makespan < 1 h holds: makespan is 33 ms, 100 % below 3600 s"
    assert answer.startswith("33 ms per step")
    assert (code, err) == (3, f"assert: {text} does not hold: {message}\n")


def test_each_condition_that_fails_has_its_line(call):
    code, _, err = call(*RUN, "--assert", "makespan<30ms", "--assert", "bubble_ratio<0.2")
    assert (code, err.count("assert: ")) == (3, 2)


@with_cases("text answer lines", *read_cases("conditions on lists"))
def test_all_entries_of_a_list_have_to_hold(text, answer, lines):
    """An empty list holds; an entry that lacks the key does not pass in silence."""
    results = verdicts(parse_assertions("trace", [text]), answer)
    failures = [line for is_met, line in results if not is_met]
    assert len(failures) == len(lines)
    assert all(f"suspects[0].{n}" in line for n, line in zip(lines, failures, strict=True))


@pytest.mark.parametrize("answer", [{}, {"remedies": []}, {"remedies": None}])
def test_an_entry_that_is_not_there_is_named(answer):
    conditions = parse_assertions("trace", ["remedies[0].saves < 1 s"])
    with pytest.raises(ValueError, match=r"this answer has no remedies\[0\].saves"):
        verdicts(conditions, answer)


def test_a_value_that_this_answer_lacks(call):
    code, _, err = call(*RUN, "--assert", "tokens_per_second > 3")
    line = "--assert 'tokens_per_second > 3': this answer has no tokens_per_second"
    assert (code, err) == (2, f"error: {line}\n")


def test_printed_commands_do_not_repeat_conditions(answer):
    model = "-m llama3-8b -y h100 --minibatch 4 --tensor-parallel 8"
    result = answer(*shlex.split(f"tune size -s 1f1b -P 2 {model} --assert 'step_time < 1h'"))
    assert result["next"]
    assert all("--assert" not in line for line in result["next"])
