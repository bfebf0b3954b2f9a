"""Text from a trained model."""

from collections.abc import Sequence
from pathlib import Path

from terrace.base.errors import DataError
from terrace.checkpoint.reading import Checkpoint
from terrace.data.tokenizer import Tokenizer
from terrace.train.sampling import Sampling, continue_texts
from terrace.train.trained import Trained, check_tokenizer, load_blocks


def generate_texts(model: Trained, prompts: Sequence[str], num_tokens: int, sampling: Sampling) -> list[str]:
    """Continuation of every prompt by `num_tokens` sampled tokens, or fewer if the text ends.

    Raises `DataError` for a prompt with tokens outside the model's vocabulary.
    """
    given = [_encoded(prompt, model) for prompt in prompts]
    made = continue_texts(
        model.blocks,
        model.config,
        given,
        num_tokens=num_tokens,
        context=model.context,
        sampling=sampling,
        stops=model.stops,
    )
    return [model.tokenizer.decode(ids) for ids in made]


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
    """Continuation of `prompt` by the checkpoint in `folder`, which sees at most the last `window` tokens.

    Raises `CheckpointError` for a checkpoint that is damaged or was trained with another tokenizer, and `DataError` for
    a prompt with tokens outside the model's vocabulary.
    """
    checkpoint = Checkpoint(folder)
    # Checksums first: a damaged checkpoint must not show as bad text.
    checkpoint.verify()
    check_tokenizer(checkpoint, tokenizer)
    config, blocks = load_blocks(checkpoint)
    stops = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    model = Trained(config=config, blocks=blocks, tokenizer=tokenizer, context=window, stops=stops)
    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    return generate_texts(model, [prompt], num_tokens, sampling)[0]


def _encoded(prompt: str, model: Trained) -> list[int]:
    ids = [int(token) for token in model.tokenizer.encode(prompt)]
    # An empty prompt starts from the end of a text, or from token 0.
    if not ids:
        ids = [model.tokenizer.end_of_text if model.tokenizer.end_of_text is not None else 0]
    if max(ids) >= model.config.vocab_size:
        raise DataError(
            f"the prompt has token {max(ids)}, but the model was trained with {model.config.vocab_size} only"
        )
    return ids
