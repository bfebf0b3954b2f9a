"""Low-rank adapters: configuration, modules, folders of `peft`."""
