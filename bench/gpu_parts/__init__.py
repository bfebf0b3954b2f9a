"""Parts of `bench/gpu.py`: each a module with `rows(setting)`, which yields rows as they are found."""
