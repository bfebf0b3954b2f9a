"""Writing text: pages against whole passes, the cost of a token, and the ends of texts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import CheckpointError, DataError, ModelError
from terrace.generation.request import Sampling
from terrace.generation.texts import continue_texts
from terrace.model.arranged import PackedLinear, arrange
from terrace.model.config import load_model, to_table
from terrace.model.hf.written import write_pretrained
from terrace.train.generate import generate_texts
from terrace.train.trained import load_trained
from tests.support.generation import MODELS, VOCAB, make, named
from tests.support.nightly import in_turns
from tests.support.toys import run_blocks

GREEDY = Sampling(temperature=0.0)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    found: list[int] = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def greedy_without_a_cache(blocks: list[nn.Module], prompt: list[int], num_tokens: int, context: int) -> list[int]:
    """Every token by a whole pass over the tokens that it may look back on, as the docs describe."""
    text, begin = list(prompt), max(0, len(prompt) - context)
    for _ in range(num_tokens):
        if len(text) - begin > context:
            begin = len(text) - context // 2
        text.append(int(run_blocks(blocks, torch.tensor([text[begin:]]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", in_turns(2, MODELS))  # tests/generation has the others by day
def test_greedy_text_is_the_same_with_and_without_a_cache(name: str) -> None:
    """Prompts of other lengths at once, texts longer than the context."""
    config, context = MODELS[name], 12
    blocks, prompts = make(config), [tokens_of(1), tokens_of(7, 1), tokens_of(12, 2), tokens_of(30, 3)]
    made = continue_texts(blocks, config, prompts, num_tokens=16, context=context, sampling=GREEDY)
    rolls = 0 < config.sliding_window <= context and not config.most_positions
    reach = 10**6 if rolls else context  # a window alone limits how far texts look back
    for prompt, text in zip(prompts, made, strict=True):
        assert list(text.tokens) == greedy_without_a_cache(blocks, prompt, 16, reach)
    assert len({token for text in made for token in text.tokens}) > 6  # or there is nothing to compare


class Counted(nn.Module):
    """An embedding that counts calls and tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls: list[int] = []

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        self.calls.append(tokens.numel())
        out: Tensor = self.module(tokens, positions)
        return out


def test_a_token_costs_one_pass_of_one_token() -> None:
    """200 tokens beyond a prompt of 10; with a context of 40 the last 20 tokens pass together, once in 21 tokens."""
    for config, context, again in ((MODELS["llama"], 300, 0), (MODELS["llama"], 40, 9), (MODELS["window"], 40, 0)):
        embedding, *others = make(config)
        counted = Counted(embedding)
        continue_texts([counted, *others], config, [tokens_of(10)], num_tokens=200, context=context, sampling=GREEDY)
        assert counted.calls[0] == 10
        assert sorted(counted.calls[1:]) == [1] * (199 - again) + [20] * again


def test_a_text_that_ends_leaves_the_batch() -> None:
    """Prompts pass end to end; each later pass has one token of every text that goes on, wherever its row was."""
    config = MODELS["llama"]
    embedding, *others = make(config)
    counted, lengths = Counted(embedding), [3, 8, 1, 5]
    prompts = [tokens_of(length, seed) for seed, length in enumerate(lengths)]
    alone = [
        continue_texts([embedding, *others], config, [prompt], num_tokens=12, context=32, sampling=GREEDY)[0].tokens
        for prompt in prompts
    ]
    stop = alone[1][4]
    wanted = [text[: text.index(stop) + 1] if stop in text else text for text in alone]
    assert len(set(map(len, wanted))) > 1
    made = continue_texts([counted, *others], config, prompts, num_tokens=12, context=32, sampling=GREEDY, stops=[stop])
    assert [each.tokens for each in made] == wanted
    going = [sum(len(text) > step + 1 for text in wanted) for step in range(11)]
    assert counted.calls == [sum(lengths), *(number for number in going if number)]


@pytest.mark.parametrize("num_texts", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "normed heads", "tied", "mixtral", "glm4_moe", "sunk"])
def test_arranged_matrices_give_the_same_numbers(name: str, num_texts: int) -> None:
    """Frozen fp32 matrices by columns or packed, biases included; trained and fp64 matrices stay as they are."""
    config = replace(MODELS["llama"], tied_embeddings=True) if name == "tied" else MODELS[name]
    plain, arranged = make(config), make(config)
    for block in arranged:
        block.float().requires_grad_(False)
    tokens, positions = torch.tensor([tokens_of(9)]), torch.tensor([[*range(4), *range(5)]])
    wanted = run_blocks(plain, tokens, positions)
    arrange(plain, num_texts)
    assert torch.equal(run_blocks(plain, tokens, positions), wanted)
    before = {key: id(value) for key, value in named(arranged).items()}
    arrange(arranged, num_texts)
    arrange(arranged, num_texts)  # once more changes nothing
    torch.testing.assert_close(run_blocks(arranged, tokens, positions).double(), wanted, atol=1e-3, rtol=1e-4)
    is_packed = any(isinstance(module, PackedLinear) for block in arranged for module in block.modules())
    assert is_packed == (num_texts > 1)
    if not is_packed:
        assert {key: id(value) for key, value in named(arranged).items()} == before
        assert all(
            module.weight.stride(0) == 1
            for block in arranged
            for module in block.modules()
            if isinstance(module, nn.Linear)
        )
        # Arranged for several texts afterwards.
        arrange(arranged, 3)
        torch.testing.assert_close(run_blocks(arranged, tokens, positions).double(), wanted, atol=1e-3, rtol=1e-4)
        assert any(isinstance(module, PackedLinear) for block in arranged for module in block.modules())


def test_texts_do_not_depend_on_those_beside_them_and_end_where_they_are_told_to() -> None:
    config = MODELS["llama"]
    blocks, prompts = make(config), [tokens_of(4, seed) for seed in range(3)]
    drawn = Sampling(temperature=1.0, top_k=0, seed=3)
    texts = continue_texts(blocks, config, prompts, num_tokens=20, context=32, sampling=drawn)
    for row, text in enumerate(texts):
        beside = [tokens_of(7, 10 + other) for other in range(3)]
        beside[row] = prompts[row]
        again = continue_texts(blocks, config, beside, num_tokens=20, context=32, sampling=drawn)[row]
        assert again.tokens == text.tokens
    first, second, last = (each.tokens for each in texts)
    end = next(end for end, token in enumerate(second) if end > 3 and token not in (*second[:end], *first, *last))
    stop = second[end]
    stopped = continue_texts(blocks, config, prompts, num_tokens=20, context=32, sampling=drawn, stops=[stop])
    assert [each.tokens for each in stopped] == [first, second[: end + 1], last]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mixtral", "glm4_moe"])
def test_a_hugging_face_folder_writes_as_transformers_does(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = MODELS[name]
    blocks = make(config)
    folder = tmp_path / "model"
    held = named(blocks)
    write_pretrained(folder, config, lambda block, key: held[block, key].detach(), "fp64")
    prompt = "def f(x):"
    ids = list(prompt.encode())
    eager = {} if config.experts is None else {"experts_implementation": "eager"}  # the others refuse fp64
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    wanted = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    model = load_trained(folder, dtype="fp64", tokenizer="bytes")
    made = continue_texts(model.blocks, model.config, [ids], num_tokens=12, context=model.context, sampling=GREEDY)
    assert list(made[0].tokens) == wanted[0, len(ids) :].tolist()
    # Texts of mixed length, which transformers pads on the left; in fp32 their matrices are packed.
    texts = [ids, ids[:1], ids[2:8], ids + ids]
    longest = max(map(len, texts))
    padded = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    wanted = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for dtype in ("fp64", "fp32"):
        model = load_trained(folder, dtype=dtype, tokenizer="bytes")
        mixed = continue_texts(model.blocks, model.config, texts, num_tokens=12, context=model.context, sampling=GREEDY)
        assert [list(each.tokens) for each in mixed] == wanted[:, longest:].tolist()
    tokens = made[0].tokens
    assert generate_texts(model, [prompt, ""], 3, GREEDY)[0] == model.tokenizer.decode(tokens[:3])
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json: .* or --tokenizer bytes if"):
        load_trained(folder)


def test_a_stop_text_is_where_the_printed_text_ends(tmp_path: Path) -> None:
    config = MODELS["llama"]
    held = named(make(config))
    write_pretrained(tmp_path, config, lambda block, key: held[block, key].detach(), "fp64")
    model = load_trained(tmp_path, dtype="fp64", tokenizer="bytes")
    whole, other = generate_texts(model, ["A", "Bc"], 30, GREEDY)
    stop = whole[9:12]
    assert len(stop) == 3
    assert generate_texts(model, ["A"], 30, GREEDY, ["not there", stop]) == [whole[: whole.index(stop)]]
    assert generate_texts(model, ["A", "Bc"], 30, GREEDY, ["not there"]) == [whole, other]


def test_dropout_is_for_training_alone(tmp_path: Path) -> None:
    held = named(make(MODELS["gpt2"]))
    folder = tmp_path / "model"
    write_pretrained(folder, MODELS["gpt2"], lambda block, key: held[block, key].detach(), "fp32")
    table = json.loads((folder / "config.json").read_text())
    left_out = {key: value for key, value in table.items() if not key.endswith("_pdrop")}
    for published in ({**table, "resid_pdrop": 0.1}, left_out):
        (folder / "config.json").write_text(json.dumps(published))
        assert load_trained(folder, tokenizer="bytes").config == MODELS["gpt2"]
        with pytest.raises(ModelError, match=r"resid_pdrop = 0\.1"):
            load_model(str(folder))


def test_what_ends_a_text_is_what_the_folder_says(tmp_path: Path) -> None:
    config = replace(MODELS["llama"], vocab_size=200)
    held = named(make(config))
    folder = tmp_path / "model"
    write_pretrained(folder, config, lambda block, key: held[block, key].detach(), "fp32")
    (folder / "config.json").write_text(json.dumps({**to_table(config), "eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    model = load_trained(folder, tokenizer="bytes")
    assert model.stops == (7, 9, 11, 256)
    assert model.context == 32
    with pytest.raises(DataError, match="the prompt has token 226, but the model was trained with 200 only"):
        generate_texts(model, ["a€"], 1, GREEDY)
