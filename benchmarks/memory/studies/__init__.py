"""Studies of allocators of KV and states: runs, tables and figures behind `benchmarks/memory/allocators.py`."""
