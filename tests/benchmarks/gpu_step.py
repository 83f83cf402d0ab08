"""A training step of a Llama in bfloat16 on a GPU: here, by `torch.compile` with inductor, and in JAX alone.

    XLA_PYTHON_CLIENT_PREALLOCATE=false TPU_PLATFORM=cuda python -m tests.benchmarks.gpu_step

It needs JAX's CUDA platform (`pip install '.[cuda]'`), and for inductor a CUDA build of torch: without one
those rows are left out. It takes the Llama of 1B on 4 sequences of 1,024 tokens: six states of 7 GB. Where
there is no GPU it refuses; `--config llama-5m --host` tries it out on the CPU. JAX has attention by cuDNN,
and written out, as most people do. Bars: 1.05x JAX's time, and no slower than inductor.
"""

import argparse
import sys
from collections.abc import Callable

import jax
import torch

from tests.benchmarks import jax_reference, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import interleave
from tests.benchmarks.jax_target import JaxSteps
from tputrain.models.llama import LLAMA_CONFIGS, Llama


def rows(name: str, size: int, length: int, rounds: int, calls: int, on_gpu: bool) -> list[Row]:
    config = LLAMA_CONFIGS[name]
    batch = torch_step.llama_batch(config, size, length)

    def model() -> Llama:
        return torch_step.llama(config).to(torch.bfloat16)

    targets: dict[str, Callable[[int], None]] = {
        **torch_step.in_each_form(model, torch_step.llama_loss, batch)
    }
    attention: dict[str, str | None] = {"jax": None, "jax, cuDNN": "cudnn"} if on_gpu else {"jax": None}
    for other, implementation in attention.items():
        state = jax_reference.initial_state(model())
        targets[other] = JaxSteps(state, jax_reference.llama_loss(config, implementation), batch)
    if torch.cuda.is_available() or not on_gpu:
        own = "cuda" if on_gpu else "cpu"
        step = torch_step.TrainingStep(model(), torch_step.llama_loss, batch, own, compiled=True)
        targets["inductor"] = torch_step.NativeSteps(step)
    timings = interleave(targets, calls=calls, rounds=rounds)
    return [
        Row(
            f"{name}, bfloat16: {form} / {other}",
            timings[form].minimum / timings[other].minimum,
            "<=",
            bar,
            f"{timings[form]} / {timings[other]}",
        )
        for form in ("captured", "compile", "fused")
        for other, bar in (*((name, 1.05) for name in attention), ("inductor", 1.0))
        if other in timings
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="llama-1b", choices=sorted(LLAMA_CONFIGS))
    parser.add_argument("--size", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5, help="steps a round")
    parser.add_argument("--host", action="store_true", help="on the CPU, to try it out")
    options = parser.parse_args()
    if not options.host and jax.default_backend() != "gpu":
        parser.error(
            f"expected a GPU in JAX, found {jax.default_backend()!r}: install '.[cuda]' and set "
            "TPU_PLATFORM=cuda; --host tries it out on the CPU"
        )
    table = rows(
        options.config, options.size, options.length, options.rounds, options.calls, on_gpu=not options.host
    )
    return not print_table(table)


if __name__ == "__main__":
    sys.exit(main())
