"""40 tokens of a decoder that grows by one a turn: cold, and with a warm executable cache.

Three are written here: nanoGPT's character models for a CPU and for a GPU, and four layers of a GPT-2. They
have no cache of keys and values, so all of it grows. The others are transformers' GPT-2 of 4 layers of 256,
with such a cache, which then is what grows, and without. Beside each figure: what the CPU device takes.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.backend.fresh_process import found_by
from tests.backend.test_growing_sizes import Decoder
from tests.benchmarks.bars import Row, print_table

LAYOUTS = {
    "4 layers of 128": {"length": 64, "vocabulary": 65, "width": 128, "layers": 4},
    "6 layers of 384": {"length": 256, "vocabulary": 65, "width": 384, "layers": 6},
    "4 layers of 768": {"length": 1024, "vocabulary": 50257, "width": 768, "layers": 4},
}
CACHES = {"GPT-2 with a cache": True, "GPT-2 without a cache": False}
WAYS = ("greedy", "sampled")
TOKENS = 40

Generate = Callable[[nn.Module, Tensor], Tensor]


def own(layout: str, way: str) -> tuple[nn.Module, Tensor, Generate]:
    def generate(model: nn.Module, prompt: Tensor) -> Tensor:
        return model.generate(prompt, TOKENS, greedy=way == "greedy")

    model = Decoder(by_hand=False, **LAYOUTS[layout])
    return model, torch.zeros((1, 1), dtype=torch.long), generate


def of_transformers(name: str, way: str) -> tuple[nn.Module, Tensor, Generate]:
    import transformers

    config = transformers.GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4, initializer_range=0.3)
    options = {"max_new_tokens": TOKENS, "do_sample": way == "sampled", "use_cache": CACHES[name]}
    options |= {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 0}

    def generate(model: nn.Module, prompt: Tensor) -> Tensor:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    return transformers.GPT2LMHeadModel(config), torch.tensor([[3, 1, 2]]), generate


def measure(name: str, way: str, directory: str) -> dict[str, Any]:
    """One process: seconds of the first call, and of a second on the CPU; programs; tokens, and the CPU's."""
    torch.tpu.set_executable_cache(directory)
    torch.manual_seed(0)
    model, prompt, generate = (own if name in LAYOUTS else of_transformers)(name, way)
    model = model.eval()
    expected = generate(model, prompt).tolist()
    start = time.perf_counter()
    generate(model, prompt)
    native = time.perf_counter() - start
    model, prompt = model.to("tpu"), prompt.to("tpu")
    torch.tpu.synchronize()
    torch.tpu.manual_seed(7)
    before = torch.tpu.compile_stats()
    start = time.perf_counter()
    tokens = generate(model, prompt).tolist()
    seconds = time.perf_counter() - start
    after = torch.tpu.compile_stats()
    counts = {name: after[name] - before[name] for name in ("compilations", "disk_hits")}
    expected = expected if way == "greedy" else None
    return {"seconds": seconds, "native": native, "tokens": tokens, "expected": expected} | counts


def rows(names: Sequence[str] = (*LAYOUTS, *CACHES)) -> list[Row]:
    result = []
    for name, way in itertools.product(names, WAYS):
        expected = None
        with tempfile.TemporaryDirectory() as directory:
            for state, bar in (("cold", 15.0), ("warm", 1.0)):
                found = found_by("tests.benchmarks.generate", name, way, directory)
                programs = f"{found['compilations']} programs compiled, {found['disk_hits']} found"
                detail = f"{programs}; the CPU device {found['native']:.2f} s"
                title = f"{name}, {way}, {state}"
                result.append(
                    Row(f"{title}: seconds for {TOKENS} tokens", found["seconds"], "<=", bar, detail)
                )
                expected = found["expected"] or expected  # sampled: of the warm start the cold one's
                if expected is not None:
                    equal = float(found["tokens"] == expected)
                    whose = "the CPU's" if way == "greedy" else "the cold start's"
                    result.append(Row(f"{title}: tokens are {whose}", equal, "==", 1))
                expected = found["tokens"]
    return result


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        sys.exit(not print_table(rows(sys.argv[1:]) if sys.argv[1:] else rows()))
