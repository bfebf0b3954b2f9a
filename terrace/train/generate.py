"""Text from a checkpoint: sampling with the whole model on one device."""

from pathlib import Path

import torch
from torch import Tensor, nn

from terrace.base.errors import CheckpointError, DataError
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, run_blocks
from terrace.runtime.describe import replace_parameters
from terrace.train.adapted import merged_values
from terrace.train.checkpoint import Checkpoint
from terrace.train.data import Tokenizer


def load_blocks(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> tuple[ModelConfig, list[nn.Module]]:
    """Return the model of a checkpoint as plain single-device blocks, in fp32."""
    config = parse_model(checkpoint.facts["model"])
    blocks = build_blocks(config)
    wanted = dict(zip(checkpoint.layout, blocks, strict=True))
    replacements: dict[int, nn.Parameter] = {}
    for block, name, value in merged_values(checkpoint):
        replacements[id(wanted[block].get_parameter(name))] = nn.Parameter(value.to(device, torch.float32), False)
    replace_parameters(blocks, replacements)
    return config, blocks


@torch.no_grad()
def generate(
    folder: Path,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    window: int = 256,
) -> str:
    """Return the continuation of `prompt` by `num_tokens` sampled tokens, or fewer when the text ends.

    `temperature` 0 takes the likeliest token. At most `window` tokens are looked back on. Raises
    `CheckpointError` for a checkpoint that is damaged or was trained with another tokenizer, and `DataError`
    for a prompt with tokens that the model does not have.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    trained_with = checkpoint.facts.get("tokenizer")
    if trained_with != tokenizer.fingerprint:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer ({trained_with}, not {tokenizer.fingerprint}): "
            "name the one of its config.toml"
        )
    config, blocks = load_blocks(checkpoint)
    window = min(window, config.max_positions) if config.learned_positions else window
    generator = torch.Generator().manual_seed(seed)
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if not ids:
        ids = [tokenizer.end_of_text if tokenizer.end_of_text is not None else 0]
    if max(ids) >= config.vocab_size:
        raise DataError(f"the prompt has token {max(ids)}, but the model was trained with {config.vocab_size} only")
    num_given = len(ids)
    for _ in range(num_tokens):
        logits = run_blocks(blocks, torch.tensor([ids[-window:]]))[0, -1].float()  # (vocabulary,)
        token = _sample(logits, temperature, top_k, generator)
        if token == tokenizer.end_of_text:
            break
        ids.append(token)
    return tokenizer.decode(ids[num_given:])


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    values, indices = logits.topk(min(top_k, logits.numel()) if top_k > 0 else logits.numel())
    # The largest becomes zero, so that no temperature makes it overflow.
    choice = torch.multinomial(((values - values[0]) / temperature).softmax(-1), 1, generator=generator)
    return int(indices[choice])
