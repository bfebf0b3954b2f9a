"""A trained model in one process, from a run's newest checkpoint or a Hugging Face folder."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from terrace.base.errors import CheckpointError, ConfigError, ModelError, did_you_mean
from terrace.base.hub import model_folder
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint, not_finite
from terrace.data.converted import other_form
from terrace.data.ends import ends_of
from terrace.data.tokenizer import BYTES, Tokenizer, load_tokenizer, trained_otherwise
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, load_model, parse_model
from terrace.model.decoder import build_blocks, next_token_blocks
from terrace.model.facts import has_scalar_head, positions_of
from terrace.model.hf.folder import CONFIG, TOKENIZER, adapter_words, holds_weights
from terrace.model.hf.pretrained import Pretrained
from terrace.runtime.describe import replace_parameters
from terrace.runtime.norm import is_finite
from terrace.train.adapted import decoded_words, merged_values
from terrace.train.folder import check_source, no_run_words, run_above
from terrace.train.runs import TrainedFolder, read_run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model with its tokenizer, its training sequence length, and the tokens that end a text or a turn.

    `tokenizer_path` and `template_path` locate the chat template that it was trained with. `note` is a line on
    weights that the checkpoint holds in another form.
    """

    config: ModelConfig
    blocks: list[nn.Module]
    tokenizer: Tokenizer
    context: int
    stops: tuple[int, ...]
    tokenizer_path: str = BYTES
    template_path: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if has_scalar_head(self.config):
            raise ModelError(
                "the model has one output a token, a score, and predicts no token: name a model with an output matrix"
            )


def load_trained(
    folder: Path, *, dtype: str = "fp32", tokenizer: str | None = None, device: torch.device | str = "cpu"
) -> Trained:
    """Loads a folder written by a run or by `save_pretrained`, in `dtype`: fp32, bf16 or fp64.

    The tokenizer is the folder's, unless `tokenizer` names another. Raises `CheckpointError` for any other folder and
    for a checkpoint that is damaged or was trained with another tokenizer, and the errors of reading it.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r} is not known{did_you_mean(dtype, DTYPES)}")
    folder = Path(model_folder(str(folder), whole=True))
    if (folder / "config.toml").is_file():
        return _of_run(folder, DTYPES[dtype], tokenizer, device)
    if (folder / CONFIG).is_file() and holds_weights(str(folder)):
        return _of_hugging_face(folder, DTYPES[dtype], tokenizer, device)
    if words := adapter_words(folder):
        raise ModelError(words)
    if run_above(folder) is not None:
        raise CheckpointError(no_run_words(folder))
    raise CheckpointError(
        f"{folder} is neither a run folder (config.toml) nor a Hugging Face folder ({CONFIG} and *.safetensors): name "
        "one that a run of Terrace or save_pretrained has left"
    )


def load_blocks(
    checkpoint: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, list[nn.Module]]:
    """The model of a checkpoint as plain single-device blocks, with adapters merged into the base weights."""
    config = parse_model(checkpoint.facts["model"])
    return next_token_blocks(
        config,
        with_values(config, merged_values(checkpoint), device, dtype, checkpoint.folder, list(checkpoint.layout)),
    )


def with_values(
    config: ModelConfig,
    values: Iterable[tuple[str, str, Tensor]],
    device: torch.device | str,
    dtype: torch.dtype,
    where: Path,
    names: list[str] | None = None,
) -> list[nn.Module]:
    """Builds the model's blocks from (block, parameter, value) triples. `where` is named in errors; `names` are the
    blocks' names.

    Raises `CheckpointError` naming a parameter with inf or nan.
    """
    blocks = build_blocks(config)
    specs = block_specs(config)
    wanted = dict(zip(names or [spec.name for spec in specs], blocks, strict=True))
    # Rounding would lose the small steps of a parameter that is moved by counts.
    moved = {param.name for spec in specs for param in spec.params if param.is_expert_bias}
    replacements: dict[int, nn.Parameter] = {}
    for block, name, value in values:
        given = value.to(device, torch.promote_types(dtype, torch.float32) if name in moved else dtype)
        if not is_finite(given):
            raise not_finite(where, f"{block}.{name}")
        # Keyed by identity, so that a tied parameter is replaced in every place.
        replacements[id(wanted[block].get_parameter(name))] = nn.Parameter(given, False)
    replace_parameters(blocks, replacements)
    return blocks


def check_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raises `CheckpointError` if the checkpoint was trained with another tokenizer."""
    trained_with = checkpoint.facts.get("tokenizer")
    if trained_with != tokenizer.fingerprint:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with another tokenizer ({trained_with}, not {tokenizer.fingerprint}): "
            f"{trained_otherwise(str(trained_with), tokenizer)}"
        )


def _of_run(folder: Path, dtype: torch.dtype, tokenizer: str | None, device: torch.device | str) -> Trained:
    run = read_run(folder)
    newest = latest(run.saves)
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint yet")
    checkpoint = Checkpoint(newest)
    # Checksums first, so that a damaged file gives an error rather than a bad model.
    checkpoint.verify()
    path = tokenizer or run.tokenizer
    own = load_tokenizer(path, run.bos, run.eos)
    # A task's tokenizer exists only as the run's copy, which `check_source` verifies.
    if tokenizer is not None or isinstance(run, TrainedFolder):
        check_tokenizer(checkpoint, own)
    config, blocks = load_blocks(checkpoint, device, dtype)
    check_source(folder)
    return Trained(
        config=config,
        blocks=blocks,
        tokenizer=own,
        context=run.context,
        stops=ends_of(own, path, run.template, run.source),
        tokenizer_path=path,
        template_path=run.template,
        note=decoded_words(checkpoint),
    )


def _of_hugging_face(folder: Path, dtype: torch.dtype, tokenizer: str | None, device: torch.device | str) -> Trained:
    if tokenizer is None and not (folder / TOKENIZER).is_file() and other_form(folder) is None:
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}: name one with --tokenizer PATH, or --tokenizer {BYTES} if the model was "
            f"trained on {BYTES}"
        )
    path = tokenizer or str(folder / TOKENIZER)
    own = load_tokenizer(path)
    weights = Pretrained(folder, load_model(str(folder), training=False))
    weights.check()
    config = weights.config
    names = ((spec.name, param.name) for spec in block_specs(config) for param in spec.params)
    values = ((block, name, weights.value(block, name)) for block, name in names)
    blocks = with_values(config, values, device, dtype, folder)
    return Trained(
        config=config,
        blocks=blocks,
        tokenizer=own,
        context=positions_of(config),
        stops=ends_of(own, path, folder=folder),
        tokenizer_path=path,
    )
