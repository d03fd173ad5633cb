"""Costs of ops, messages and memory, in seconds and bytes: measured, given or from a model.

Costs are the record of all times (`costs`). What makes them has one order of arguments: where the
times come from, the table, then options by keyword.

- `Costs(forward=...)`, `Costs.uniform(table, forward=...)`, `Costs.per_worker(table, forward=...)`
- `stage_costs(workload, system, table, lengths=...)`: a model on a machine (`stage`)
- `read_costs(path, table, places=...)`: a file of measurements (`measured`)
- `scaled_costs(costs, table, rules, workers=..., microbatches=...)`: other costs (`scaling`)
- `topology_costs(costs, table, topology)`: the links that messages go over (`topology`)
"""
