"""Device "tpu" against the CPU over PyTorch's own test databases.

python -m tests.operators.sweep --database op_db --dtype float32     measure; one JSON row an entry
python -m tests.operators.report --rows FILE                         write known.json and docs/operators.md
"""
