"""Greedy generation against `transformers.generate` from one exported folder: `python -m bench.generation`.

A Llama of 34 M parameters continues one text, and eight texts of mixed length at once. Each library has a process of
its own, one thread and fp32, and they take turns; transformers gets the eight texts padded on the left, under a mask.
The time is processor time of the whole call, prompts included.

A mixture of 8 experts, of which a token passes 2, then takes turns with the dense model of its active size, its MLPs
as large as two experts, both by Terrace and from a prompt of one token.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.claims import compared, judge, print_table, ratio_words, versioned
from bench.common import bench_parser
from bench.contest import Work, take_turns
from terrace.generation.request import Sampling
from terrace.generation.texts import continue_texts
from terrace.train.trained import load_trained

TARGETS = {"one text": 0.8, "eight texts": 0.5}
MIXTURE_TARGET = 1.2
LENGTHS = {"one text": [64], "eight texts": [12, 200, 37, 90, 150, 64, 25, 120]}
VOCAB = 8192


def write_folder(folder: Path, hidden: int, layers: int, experts: int = 0) -> int:
    """Write a Llama of random values, or a Mixtral of its active size, as a Hugging Face folder; its parameters."""
    torch.manual_seed(0)
    inner = -(-8 * hidden // 3 // 128) * 128
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "initializer_range": 0.05,  # likeliest tokens are then far apart, and rounding chooses none
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if experts:
        routed: dict[str, Any] = {
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
            "intermediate_size": inner // 2,
        }
        model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **routed))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=inner))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """A text of random tokens for each length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def own(folder: Path, prompts: list[list[int]], num_tokens: int) -> Work:
    """Terrace."""
    model = load_trained(folder, tokenizer="bytes")
    greedy = Sampling(temperature=0.0)

    def work() -> Any:
        made = continue_texts(
            model.blocks, model.config, prompts, num_tokens=num_tokens, context=model.context, sampling=greedy
        )
        return [list(each.tokens) for each in made]

    return work


def theirs(folder: Path, prompts: list[list[int]], num_tokens: int) -> Work:
    """Transformers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}

    def work() -> Any:
        return model.generate(tokens, attention_mask=mask, **options)[:, longest:].tolist()

    return work


def products(folder: Path, num_texts: int, num_tokens: int) -> Work:
    """The products of weights with `num_tokens` tokens of each text, and nothing else."""
    parameters = [p for block in load_trained(folder, tokenizer="bytes").blocks[1:] for p in block.parameters()]
    matrices = [parameter.detach() for parameter in parameters if parameter.dim() == 2]
    rows = {matrix.shape[1]: torch.randn(num_texts, matrix.shape[1]) for matrix in matrices}

    def work() -> Any:
        for _ in range(num_tokens):
            for matrix in matrices:
                torch.nn.functional.linear(rows[matrix.shape[1]], matrix)

    return work


def main() -> int:
    """Print the table; return 1 when --check is given and a target is missed."""
    parser = bench_parser(__doc__, rounds=7, hidden=512, layers=8, tokens=64)
    options = parser.parse_args()
    rows, claims, wrong = [], [], []
    rival = versioned("transformers", "generate")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_params = write_folder(folder, options.hidden, options.layers)
        print(f"{num_params / 1e6:.1f} M parameters, {options.tokens} tokens, fp32, one thread\n")
        for setting, lengths in LENGTHS.items():
            job = folder, prompts_of(lengths), options.tokens
            alone = products, (folder, len(lengths), options.tokens)
            seconds, made = take_turns({"own": (own, job), "theirs": (theirs, job), "products": alone}, options.rounds)
            claim = f"greedy generation, {setting}, processor time"
            share = statistics.median(seconds["products"]) / statistics.median(seconds["theirs"])
            bound = f"products of new tokens with weights alone take {share:.2f} of the rival's time on this machine"
            claims.append(
                compared(claim, seconds["own"], seconds["theirs"], TARGETS[setting], rival=rival, bound=bound)
            )
            differ = sum(a != b for a, b in zip(made["own"], made["theirs"], strict=True))
            if differ:
                wrong.append(f"{setting}: {differ} of {len(lengths)} differ from those of {rival}")
            medians = (f"{statistics.median(seconds[who]) * 1e3 / options.tokens:.1f}" for who in ("theirs", "own"))
            rows.append([setting, rival, *medians, ratio_words(seconds["own"], seconds["theirs"])])
        write_folder(folder / "mixture", options.hidden, options.layers, experts=8)
        jobs = {"mixture": folder / "mixture", "dense": folder}
        turns = {name: (own, (where, prompts_of([1]), options.tokens)) for name, where in jobs.items()}
        seconds, _ = take_turns(turns, options.rounds)
        rival = "a dense model of its active size"
        claim = "greedy generation, a token of a mixture, processor time"
        claims.append(compared(claim, seconds["mixture"], seconds["dense"], MIXTURE_TARGET, rival=rival))
        medians = (f"{statistics.median(seconds[who]) * 1e3 / options.tokens:.1f}" for who in ("dense", "mixture"))
        rows.append(["mixture, one text", rival, *medians, ratio_words(seconds["mixture"], seconds["dense"])])
    print_table(["texts", "rival", "its CPU ms a token", "own", "ratio (quartiles)"], rows)
    return judge(claims, options, wrong)


if __name__ == "__main__":
    sys.exit(main())
