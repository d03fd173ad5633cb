"""Certificates of what commands report: derived again before it is printed, and written."""

import json
from typing import Any

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.output.files import Output


def certify(claimed: dict[str, Any], out: Output) -> None:
    """Write a certificate, where a file is named for it, and derive it again.

    Raises:
      AssertionError: if a claim does not hold: an internal error.
    """
    out.save(lambda draft: write_file(draft, json.dumps(claimed, allow_nan=False)))
    verdict = pj.verify(claimed)
    if not verdict.ok:
        kept = f"; the certificate is in {out.written}" if out.written else ""
        raise AssertionError(
            f"{len(verdict.problems)} claims of the result do not hold, first {verdict.problems[0]}"
            f"{kept}: please report it"
        )
