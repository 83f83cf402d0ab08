"""A differential fuzzer: small random programs of torch functions, on the device against the CPU.

python -m tests.operators.fuzz --programs 20000 --seed 0     prints each failure as a script that shows it
"""
