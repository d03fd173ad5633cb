"""A rank of PyTorch's runtime as the package has it, but that one of its steps begins late."""

import time

from pipejax.runtimes.gloo import process
from pipejax.runtimes.processes import serve

RANK, STEP, SECONDS = 1, 2, 0.6  # which rank, in which timed step, by how much


class LateRun(process.TableRun):
    """A table whose first step is not timed."""

    steps = 0

    def step(self):
        """Sleep before one of the steps."""
        if self.steps == STEP + 1 and self.rank == RANK:
            time.sleep(SECONDS)
        self.steps += 1
        return super().step()


if __name__ == "__main__":
    process.TableRun = LateRun
    serve(process.answer_to)
