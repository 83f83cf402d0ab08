"""Greedy generation with a key-value cache: the ids are the CPU's, and a third prompt compiles nothing."""

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.models.architectures import BART, DECODER, GPT, T5
from tests.models.compare import Row, fallbacks_since

NEW_TOKENS = 8
PROMPT = (2, 6)
PROMPTS = 3  # which values are still alive may differ in the second turn, so it may compile as well
# With a static cache transformers compiles the decoding step itself, unless it is told not to: there is no
# torch.compile on tpu tensors yet.
STATIC_CACHE = {"cache_implementation": "static", "disable_compile": True}
VARIED = {"initializer_range": 0.3}  # wide enough that a random model does not repeat one token


@dataclass(frozen=True)
class Generation:
    """`name` + "Config" and `name` + `head` are transformers' classes; `options` go to `generate`."""

    name: str
    head: str
    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        cache = self.options.get("cache_implementation", "dynamic")
        return f"{self.name} generate, {cache} cache"


GENERATIONS = (
    Generation("Llama", "ForCausalLM", DECODER | VARIED),
    Generation("Llama", "ForCausalLM", DECODER | VARIED, STATIC_CACHE),
    Generation("GPT2", "LMHeadModel", GPT | VARIED),
    Generation("Qwen3", "ForCausalLM", DECODER | VARIED | {"head_dim": 8}),
    Generation("T5", "ForConditionalGeneration", T5),
    Generation("Bart", "ForConditionalGeneration", BART | {"init_std": 0.3}),
)


def check(generation: Generation) -> Row:
    """Generate from three prompts on both devices; seconds and compilations are those of the device."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{generation.name}Config")(**generation.settings)
    on_cpu = getattr(transformers, generation.name + generation.head)(config).eval()
    on_cpu.generation_config.eos_token_id = None  # every row runs to its end
    fallbacks_before = torch.tpu.fallback_stats()
    start = time.perf_counter()
    on_tpu = copy.deepcopy(on_cpu).to("tpu")
    prompts = [
        torch.randint(4, config.vocab_size, PROMPT, generator=torch.Generator().manual_seed(seed))
        for seed in range(PROMPTS)
    ]
    compiled = [torch.tpu.compile_stats()["compilations"]]
    actual = []
    for prompt in prompts:
        actual.append(_greedy(on_tpu, prompt, "tpu", generation.options))
        compiled.append(torch.tpu.compile_stats()["compilations"])
    late = compiled[-1] - compiled[-2]
    seconds = time.perf_counter() - start
    problems = []
    for prompt, got in zip(prompts, actual, strict=True):
        want = _greedy(on_cpu, prompt, "cpu", generation.options)
        if not torch.equal(got, want):
            problems.append(f"ids {got.tolist()}, expected {want.tolist()}")
    fallbacks = fallbacks_since(fallbacks_before)
    if fallbacks:
        problems.append(f"runs on the CPU: {', '.join(sorted(fallbacks))}")
    if late:
        problems.append(f"{late} compilations for a third prompt of the same length")
    return Row(
        generation.title,
        "generation",
        seconds,
        compiled[-1] - compiled[0],
        late,
        fallbacks,
        problems=tuple(problems),
    )


def _greedy(model: Any, prompt: Tensor, device: str, options: dict[str, Any]) -> Tensor:
    ids = prompt.to(device)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        **options,
    ).cpu()
