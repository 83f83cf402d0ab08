"""Plans judged by the TPU's compiler: a step recorded without values, compiled, and what it says."""
