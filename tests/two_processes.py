"""One of two processes that solve a batch together: `two_processes.py PORT NUMBER`."""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pipejax as pj

SIZE = 600


def costs():
    """Return the whole batch, the same in both processes."""
    rng = np.random.default_rng(0)
    forward, backward = rng.random((2, SIZE, 4))
    return {"forward": forward, "backward": backward}


def main():
    port, number = sys.argv[1:]
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(number))
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    program = pj.lower(table, link="queued")
    everyone = NamedSharding(Mesh(np.array(jax.devices()), "batch"), PartitionSpec("batch"))
    half = slice(SIZE // 2 * int(number), SIZE // 2 * (int(number) + 1))
    shared = {
        name: jax.make_array_from_process_local_data(everyone, leaf[half])
        for name, leaf in costs().items()
    }
    values, counts = pj.makespans_and_grad(program, pj.Costs(**shared, transmit=0.3))
    assert values.shape == (SIZE,)
    assert not values.is_fully_addressable
    here = {name: leaf[half] for name, leaf in costs().items()}
    alone, others = pj.makespans_and_grad(program, pj.Costs(**here, transmit=0.3))
    np.testing.assert_allclose(local_part(values), alone, rtol=1e-12)
    np.testing.assert_array_equal(local_part(counts.forward), others.forward)
    np.testing.assert_allclose(
        local_part(pj.makespans(program, pj.Costs(**shared, transmit=0.3), unroll=True)), alone
    )
    print(f"process {number}: {float(np.sum(alone)):.6f}")


def local_part(array):
    """Return the part of an array that this process holds, in order."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


if __name__ == "__main__":
    main()
