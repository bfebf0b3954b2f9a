"""Terrace: train large language models on clusters whose links are unequal.

Everything is placed on a tier, and a training step is a program that can be read.
"""

TYPE_CHECKING = False  # typing's own costs half of the start of `terrace --help`

if TYPE_CHECKING:
    from terrace.model.decoder import token_loss as token_loss
    from terrace.model.hf.blocks import blocks_of as blocks_of
    from terrace.model.hf.declared import Declaration as Declaration
    from terrace.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_LAZY = {
    "Trainer": "terrace.train.trainer",
    "blocks_of": "terrace.model.hf.blocks",
    "Declaration": "terrace.model.hf.declared",
    "token_loss": "terrace.model.decoder",
}
__all__ = ["Declaration", "Trainer", "__version__", "blocks_of", "token_loss"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Torch-dependent names are imported on first access, so that `import terrace` does not import torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'terrace' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("terrace"):
            raise
        from terrace.base.extras import needs

        raise ImportError(f"terrace.{name} {needs(str(error.name))}") from error
