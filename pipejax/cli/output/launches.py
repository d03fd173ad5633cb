"""What launchers are told, as it is printed."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.text import Text

import pipejax as pj
from pipejax.cli.output.report import pick, plain


def launch_json(launches: "Iterable[pj.results.Launch]") -> dict[str, Any]:
    """What `--json` says of each launcher, by its name."""
    return {each.launcher: pick(each, "options lacks program") for each in launches}


def launch_lines(launches: "Iterable[pj.results.Launch]", *, rest: bool = False) -> Iterator[Text]:
    """Say what each launcher is told, and of those that cannot run a layout what they lack.

    With `rest` they are told the rest of it, too.
    """
    for each in launches:
        lacks = f"lacks {'; '.join(each.lacks)}" if each.lacks else ""
        told = each.text if rest or not lacks else ""
        yield plain(f"{each.launcher}: {'; the rest: '.join(filter(None, (lacks, told)))}")
