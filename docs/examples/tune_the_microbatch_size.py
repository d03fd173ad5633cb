# %% [markdown]
# # Tune the microbatch size
#
# At a fixed minibatch, small microbatches mean small bubbles and little memory; large ones mean fewer
# latencies and ops that use the machine better. Where the best lies depends on the network. Here it is
# found for a whole range of latencies.
#
# GPT-3 175B, eight workers of eight B200, 128 sequences per step, full recomputation, 1F1B with two
# stages per worker:

# %%
import dataclasses
import numpy as np
import pipejax as pj

workload = pj.Workload(
    pj.load_model("gpt3-175b"), minibatch=128, tensor_parallel=8, recompute="full"
)
b200 = pj.load_system("b200")
latencies = np.geomspace(1e-5, 1e-1, 5)  # from one hall to another continent [s]
systems = [
    dataclasses.replace(b200, network=dataclasses.replace(b200.network, latency=latency))
    for latency in latencies
]
run = pj.Scenario("interleaved-1f1b", num_workers=8, options={"stages_per_worker": 2})
tuned = [pj.tune(run.replace(costs=pj.costing.ModelCosts(workload, system))) for system in systems]
for latency, found in zip(latencies, tuned):
    print(f"{1e3 * latency:6.2f} ms: b = {found.best.microbatch_size:2}, {found.value:5.2f} s")

# %% [markdown]
# What is legal divides the minibatch, so there are few sizes, and all of them are evaluated.
#
# ## Elasticity
#
# The elasticity says how much a shorter latency would bring at the tuned size:

# %%
for k in (0, 2, 4):
    table = pj.schedules.build(
        "interleaved-1f1b",
        num_workers=8,
        stages_per_worker=2,
        num_microbatches=tuned[k].best.microbatches,
    )
    found = pj.sensitivity(table, workload, systems[k])
    print(
        f"{1e3 * latencies[k]:6.2f} ms: 1 % less takes "
        f"{found.elasticity['network.latency']:.3f} % off, bound by {found.bound_by}"
    )

# %% [markdown]
# ## All networks
#
# `pipejax sweep run` evaluates a grid of sizes, bandwidths and latencies, and
# `pipejax sweep show results.zarr --map network.bandwidth,network.latency --figure map.png` draws the best
# size on each network.
#
# Small microbatches win where bandwidth is scarce, large ones where latency is long. In between the
# best size changes more than once along one line: step times have kinks of their own, where another
# path becomes the longest.
#
# ## Several parts together
#
# What is best for one of them depends on the others. `pipejax tune` takes several parts, and `pj.tune`
# likewise (`over=("size", "layers", "recompute")`):
#
# ```sh
# pipejax tune size,layers,recompute --schedule 1f1b --workers 8 --model llama3-70b --system b200 \
#              --minibatch 256 --tensor-parallel 8
# ```
#
# `pipejax tune` evaluates all settings up to 200,000 (1,000,000 of several parts) and says how many
# there are. Of more, it improves the best usual settings by one layer at a time. `--method` decides
# otherwise.
