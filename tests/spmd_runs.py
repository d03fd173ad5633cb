"""Run as a process: run the steps of many tables in one compilation, and print their errors."""

import json
import sys

from pipejax.runtimes.spmd.execute import SmallModel
from pipejax.runtimes.spmd.instructions import SpmdSizes, sizes_for
from pipejax.runtimes.spmd.runtime import step_errors, train
from pipejax.schedules.table.table_files import from_json

if __name__ == "__main__":
    arguments = json.load(sys.stdin)
    tables, trained = (
        [from_json(entry) for entry in arguments[name]] for name in ("tables", "trained")
    )
    model, both = SmallModel(**arguments["model"]), [*tables, *trained]
    sizes = SpmdSizes.joined(sizes_for(table, arguments["workers"]) for table in both)
    largest = max(table.num_stages for table in both), sizes.microbatches
    frozen = model._replace(step_size=0.0)
    steps = (step_errors(t, train(t, frozen, sizes), frozen, *largest) for t in tables)
    errors = [[*step.values()] for step in steps]
    weights = [[w.tolist() for w in train(t, model, sizes).weights] for t in trained]
    json.dump({"errors": errors, "weights": weights}, sys.stdout)
