"""A folder that should be that of a run."""

from pathlib import Path

CONFIG = "config.toml"


def no_run_words(folder: Path) -> str:
    """Why `folder` is no run folder, and which folder above it is one, as where a checkpoint of a run was named."""
    why = f"{folder} is not a run folder: it has no {CONFIG}"
    above = next((each for each in list(folder.parents)[:3] if str(each) != "." and (each / CONFIG).is_file()), None)
    return why if above is None else f"{why}; did you mean {str(above)!r}?"
