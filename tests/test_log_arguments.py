"""Arguments of Megatron's logs: each is read, without effect, or named with what is assumed."""

import json
from pathlib import Path

import pytest

from pipejax.costs.measured.megatron_log import MegatronLog
from pipejax.costs.model.arguments import NOTHING, load_arguments

# dumps of Megatron-LM of three years and of Megatron-DeepSpeed, with their defaults
DUMPS = ("2021", "2023", "2025", "deepspeed")
DATA = Path(__file__).parent / "data"
TABLE = load_arguments("megatron")


def dump(name):
    return MegatronLog.read(DATA / f"megatron_arguments_{name}.txt")


def outcome(log, **changes):
    log = log._replace(arguments=log.arguments | changes)
    try:
        rows, notes = log.rows("model")
        return rows, log.model(), notes
    except ValueError as error:
        return str(error), None, [str(error)]


def other(value):
    if value in ("True", "False"):
        return str(value == "False")
    return str(2 * int(value) + 2) if value.isdecimal() else "7"


# by argument, others that make it count, and a value that is none of the defaults
READ = json.loads((DATA / "megatron_argument_contexts.json").read_text())
TEXTS = ("LayerNorm", "RMSNorm", "local", "transformer_engine", "rope")


def values(log, name):
    context, value = READ.get(name, ({}, None))
    before = context.get(name, log.arguments[name])
    candidates = [value, "True", "False", other(before), *TEXTS]
    return context, [v for v in candidates if v is not None and v != before]


@pytest.mark.parametrize("name", DUMPS)
def test_each_argument_is_read_or_named_or_without_effect(name):
    log = dump(name)
    log = log._replace(vocabulary=0, times=[line._replace(batch=0) for line in log.times])
    dropped = []
    for argument, value in log.arguments.items():
        if argument in TABLE.read:
            context, candidates = values(log, argument)
            before = outcome(log, **context)
            is_seen = any(outcome(log, **context | {argument: v}) != before for v in candidates)
        elif assumptions := TABLE.assumptions.get(argument):
            context = {record["with"]: "2" for record in assumptions if "with" in record}
            context |= {c: "True" for c in context if c.startswith(("has", "use"))}
            settings = [log.arguments | context | {argument: v} for v in (other(value), "False")]
            notes = [note for setting in settings for note in TABLE.notes(setting, "log")]
            is_seen = any(f" {argument} " in note and "not read" in note for note in notes)
        else:
            is_seen = TABLE.without_effect.match(argument) is not None
        if not is_seen:
            dropped.append(argument)
    assert ", ".join(dropped) == ""


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_of_defaults_names_nothing(name):
    assert dump(name).notes() == []


def test_unknown_arguments_are_listed_if_they_are_set():
    log = dump("2021")
    changed = log._replace(
        arguments=log.arguments | {"new_thing": "3", "new_switch": "False", "newer": "None"}
    )
    (note,) = changed.notes()
    assert note.endswith("1 unknown, not read: new_thing 3")
    assert NOTHING[0] == "None"
