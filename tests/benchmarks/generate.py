"""40 tokens of a decoder that grows by one a turn, with TPU_PAD_SIZES=1: cold, and with a warm cache.

The decoder is laid out as a small character model (6 layers of 384) and as four layers of a GPT-2; it has no
cache of keys and values, so all of it grows.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from tests.backend.test_growing_sizes import Decoder
from tests.benchmarks.bars import Row, print_table

LAYOUTS = {
    "6 layers of 384": {"length": 256, "vocabulary": 65, "width": 384, "layers": 6},
    "4 layers of 768": {"length": 1024, "vocabulary": 50257, "width": 768, "layers": 4},
}
TOKENS = 40


def measure(layout: str, directory: str) -> dict[str, float]:
    """One process: seconds of the first call, programs, and whether the tokens are the CPU's."""
    torch.tpu.set_executable_cache(directory)
    torch.manual_seed(0)
    model = Decoder(by_hand=False, **LAYOUTS[layout]).eval()
    prompt = torch.zeros((1, 1), dtype=torch.long)
    expected = model.generate(prompt, TOKENS, greedy=True)
    model, prompt = model.to("tpu"), prompt.to("tpu")
    torch.tpu.synchronize()
    start = time.perf_counter()
    tokens = model.generate(prompt, TOKENS, greedy=True).cpu()
    seconds = time.perf_counter() - start
    compilations = torch.tpu.compile_stats()["compilations"]
    return {"seconds": seconds, "compilations": compilations, "equal": float(torch.equal(tokens, expected))}


def rows() -> list[Row]:
    result = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as directory:
            for name, bar in (("cold", 15.0), ("warm", 1.0)):
                command = [sys.executable, "-m", "tests.benchmarks.generate", layout, directory]
                environment = os.environ | {"TPU_PAD_SIZES": "1"}
                done = subprocess.run(command, check=True, capture_output=True, env=environment)
                found = json.loads(done.stdout)
                detail = f"{found['compilations']:.0f} programs compiled"
                result += [
                    Row(
                        f"generate, {layout}, {name}: seconds for {TOKENS} tokens",
                        found["seconds"],
                        "<=",
                        bar,
                        detail,
                    ),
                    Row(f"generate, {layout}, {name}: tokens are the CPU's", found["equal"], "==", 1),
                ]
    return result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        sys.exit(not print_table(rows()))
