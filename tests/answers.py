"""Answers with `--json` that tests ask for: held against their schemas, and kept to make these."""

import atexit
import copy
import functools
import json
import os
from pathlib import Path

import fastjsonschema

from pages.schemas import union, value_schema
from pipejax.cli.app import split_command
from pipejax.cli.options.assertions import read_schema

FOLDER = os.environ.get("PIPEJAX_ANSWERS")  # where `make schemas` keeps what it needs
KEPT = {}  # schema of all answers, by command


def strict(schema):
    """Allow only the keys that a schema names."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for inner in schema.values():
            strict(inner)
    return schema


@functools.cache
def validator(command):
    return fastjsonschema.compile(strict(copy.deepcopy(read_schema(command))))


def check_answer(arguments, answer):
    """Hold an answer against the schema of its command."""
    command = split_command(arguments)[0]
    if FOLDER:
        schema = value_schema(answer, (command,))
        KEPT[command] = union(KEPT[command], schema) if command in KEPT else schema
    else:
        check_schema(command, answer)


def check_schema(command, answer):
    try:
        validator(command)(answer)
    except fastjsonschema.JsonSchemaValueException as error:
        raise AssertionError(
            f"{command} --json: {error.message}: `make schemas` if this is intended"
        ) from None


@atexit.register
def keep():
    if FOLDER:
        Path(FOLDER).mkdir(parents=True, exist_ok=True)
        (Path(FOLDER) / f"{os.getpid()}.json").write_text(json.dumps(KEPT))
