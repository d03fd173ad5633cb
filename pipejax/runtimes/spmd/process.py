"""Executed as a process of its own: steps under tables on devices that the environment asks for."""

from typing import Any

import jax

from pipejax.runtimes.processes import serve
from pipejax.runtimes.spmd.model import SmallModel
from pipejax.runtimes.spmd.training_step import run_steps
from pipejax.schedules.table.table_files import from_json


def answer_to(request: Any) -> dict[str, Any]:
    """Run a step under each table; errors that are no numbers are None."""
    tables = [from_json(data) for data in request["tables"]]
    steps = run_steps(tables, SmallModel(**request["model"]))
    return {"version": jax.__version__, "steps": [step._asdict() for step in steps]}


if __name__ == "__main__":
    serve(answer_to)
