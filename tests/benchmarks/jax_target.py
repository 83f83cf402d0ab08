"""Runs the hand-written JAX step as a benchmark's target, and says how much memory its program needs."""

from collections.abc import Callable

import jax
import numpy as np

from tests.benchmarks.jax_reference import Batch, Params, State, training_step
from tests.benchmarks.torch_step import learning_rate


class JaxSteps:
    """A target for `interleave`: steps one after the other, until the last loss is there."""

    def __init__(
        self, state: State, loss: Callable[[Params, Batch], jax.Array], batch: tuple[np.ndarray, ...]
    ) -> None:
        self.state = state
        self.step = training_step(loss)
        # int32 is what a JAX program holds tokens and labels in.
        self.batch = tuple(
            jax.device_put(array.astype(np.int32) if array.dtype == np.int64 else array) for array in batch
        )
        self.steps_done = 0

    def __call__(self, calls: int) -> None:
        for _ in range(calls):
            self.dispatch()
        jax.block_until_ready((self.state, self.loss))

    def dispatch(self) -> None:
        """One step, not waited for."""
        self.state, self.loss = self.step(self.state, np.float32(learning_rate(self.steps_done)), self.batch)
        self.steps_done += 1

    def memory(self) -> int:
        """Bytes of the program's arguments, results and temporaries; what it updates in place counts once."""
        compiled = self.step.lower(self.state, np.float32(0), self.batch).compile()
        analysis = compiled.memory_analysis()
        return (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )
