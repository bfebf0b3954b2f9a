"""Text from a trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from terrace.base.errors import DataError
from terrace.checkpoint.reading import Checkpoint
from terrace.data.chat_prompt import chat_ids
from terrace.data.tokenizer import Tokenizer
from terrace.generation.request import Completion, Sampling
from terrace.generation.texts import continue_texts
from terrace.model.facts import refuse_non_causal, vocabulary_size
from terrace.train.trained import Trained, check_tokenizer, load_blocks

Prompt = str | Sequence[int]  # a text, or the ids of one


def generate_texts(
    model: Trained,
    prompts: Sequence[Prompt],
    num_tokens: int,
    sampling: Sampling,
    stop_texts: Sequence[str] = (),
    say: Callable[[str, bool], None] = lambda words, is_fallback: None,
) -> list[str]:
    """Continues every prompt by up to `num_tokens` sampled tokens, stopping at the end of the text or before one of
    `stop_texts`.

    Special tokens in a prompt are encoded as such, and a text begins as in training. `say` is as for `continue_texts`.
    Raises `DataError` for a prompt with tokens outside the model's vocabulary.
    """
    refuse_non_causal(model.config)
    given = [_encoded(prompt, model) for prompt in prompts]
    made = continue_texts(
        model.blocks,
        model.config,
        given,
        num_tokens=num_tokens,
        context=model.context,
        sampling=sampling,
        stops=model.stops,
        stop_texts=stop_texts,
        decode=model.tokenizer.decode,
        say=say,
    )
    return [_decoded(each, model, stop_texts) for each in made]


def generate(
    folder: Path,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    window: int = 256,
    stops: tuple[int, ...] = (),
) -> str:
    """Continues `prompt` with the checkpoint in `folder`, up to one of the tokens `stops`
    (`terrace.data.ends.ends_of`). The model sees at most the last `window` tokens.

    Raises `CheckpointError` for a checkpoint that is damaged or was trained with another tokenizer, and `DataError` for
    a prompt with tokens outside the model's vocabulary.
    """
    checkpoint = Checkpoint(folder)
    # Checksums first: a damaged checkpoint must not show as bad text.
    checkpoint.verify()
    check_tokenizer(checkpoint, tokenizer)
    config, blocks = load_blocks(checkpoint)
    model = Trained(config=config, blocks=blocks, tokenizer=tokenizer, context=window, stops=stops)
    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    return generate_texts(model, [prompt], num_tokens, sampling)[0]


def chat_prompt(model: Trained, message: str) -> list[int]:
    """Token ids of a conversation that a user begins with `message`, in the chat template of the model's training."""
    return chat_ids(model.tokenizer, model.tokenizer_path, model.template_path, message)


def _encoded(prompt: Prompt, model: Trained) -> list[int]:
    ids = model.tokenizer.encode_prompt(prompt).tolist() if isinstance(prompt, str) else list(prompt)
    # An empty prompt starts from the end of a text, or from token 0.
    if not ids:
        ids = [model.tokenizer.text_tokens.end or 0]
    if max(ids) >= vocabulary_size(model.config):
        raise DataError(
            f"the prompt has token {max(ids)}, but the model was trained with {vocabulary_size(model.config)} only"
        )
    return ids


def _decoded(made: Completion, model: Trained, stop_texts: Sequence[str]) -> str:
    ids = list(made.tokens)
    if ids[-1] in model.stops:
        ids.pop()
    text = model.tokenizer.decode(ids)
    return text[: min((place for stop in stop_texts if (place := text.find(stop)) >= 0), default=len(text))]
