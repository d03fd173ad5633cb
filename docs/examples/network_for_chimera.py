# %% [markdown]
# # How much network does Chimera need?
#
# Chimera runs two pipelines through the same workers, in opposite directions. Its bubbles are smaller
# than those of 1F1B, but every worker holds two stages, exchanges their gradients with another worker
# at the end of the step, and sends twice as many messages. So there is a network below which it loses.
# Where that is depends on the number of microbatches.
#
# GPT-3 175B on eight workers of eight B200, 64 sequences per step, on 183 networks:

# %%
import tempfile
import pipejax as pj

data = pj.run_sweep(
    {
        "schedules": ["1f1b", "chimera"],
        "workers": 8,
        "minibatch": 64,
        "microbatches": [8, 16, 32],
        "models": "gpt3-175b",
        "systems": "b200",
        "tensor_parallel": 8,
        "recompute": "full",
        "outputs": ["share"],
        "system": {
            "network": {
                "bandwidth_GB_per_s": {"from": 1, "to": 1000, "points": 61, "scale": "log"},
                "latency_us": [1, 20, 200],
            }
        },
    },
    f"{tempfile.mkdtemp()}/chimera.zarr",
).load()
ratio = data.step_time.sel(schedule="chimera") / data.step_time.sel(schedule="1f1b")
ratio = ratio.assign_coords({"network.bandwidth": ratio["network.bandwidth"] / 1e9})
at_20_us = ratio.sel({"network.latency": 2e-5})
for bandwidth in (1, 10, 100, 1000):
    row = at_20_us.sel({"network.bandwidth": bandwidth}, method="nearest")
    print(f"{bandwidth:5} GB/s: Chimera / 1F1B =", *(f"{value:.2f}" for value in row.values))

# %% [markdown]
# The columns are 8, 16 and 32 microbatches. The slowest network on which Chimera wins:

# %%
wins = (ratio < 1).transpose("microbatches", "network.latency", "network.bandwidth")
for count, of_count in zip(wins.microbatches.values, wins.values):
    least = [
        f"{float(wins['network.bandwidth'][row.argmax()]):.0f} GB/s" if row.any() else "none"
        for row in of_count
    ]
    print(f"M = {count:2}: at 1, 20, 200 us latency:", ", ".join(least))

# %% [markdown]
# With as many microbatches as workers, almost any network will do. With twice as many it takes
# some 110 GB/s per accelerator; with four times as many 1F1B's bubbles are so small that two copies of the
# weights do not pay on any network. Latency hardly matters: messages are large.
#
# ## Shares of the step time
#
# The elasticities say which resource a step waits for. At 8 microbatches and 10 GB/s:

# %%
shares = data.share.sel(microbatches=8).sel(
    {"network.bandwidth": 1e10, "network.latency": 2e-5}, method="nearest"
)
for name in ("1f1b", "chimera"):
    parts = shares.sel(schedule=name)
    print(
        f"{name:8}",
        ", ".join(
            f"{label} {float(value):.0%}"
            for label, value in zip(parts.resource.values, parts.values)
            if value > 0.01
        ),
    )

# %% [markdown]
# At 10 GB/s a fifth of Chimera's step is the network, against a seventh of 1F1B's: that is what the
# smaller bubbles have to pay for.
