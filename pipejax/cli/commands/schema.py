"""`pipejax schema`: what the JSON of a command holds."""

import json
from typing import Annotated

from cyclopts import Parameter

from pipejax.base.checks import resolve_name
from pipejax.cli.app import COMMANDS, summary
from pipejax.cli.options.assertions import read_schema
from pipejax.cli.options.option import options
from pipejax.cli.output.report import Answer, plain
from pipejax.cli.output.tables import facts


@options
def schema(
    *command: Annotated[str, Parameter(name="[COMMAND]", help="for example: sweep show")],
) -> Answer:
    """Print the JSON Schema of a command's `--json`; without COMMAND, list the commands.

    Each key has its type, what it means and the unit of its number; `required` are those that every
    answer has. Keys are only added while `version` stays the same.
    """
    if not command:
        names = [{"command": name} for name in COMMANDS]
        lead = f"{len(names)} commands; pipejax schema COMMAND prints the keys of its --json"
        return Answer(names, [lead, facts((name, summary(name)) for name in COMMANDS)])
    name = resolve_name(" ".join(command), COMMANDS, "command")
    content = read_schema(name)
    return Answer(content, [plain(json.dumps(content, indent=2, ensure_ascii=False))])
