"""Cost of attention through pairs of runs over torch's own, on one CPU core, forward and backward.

    causal   a row is one document: one pair                     plain: F.scaled_dot_product_attention, causal
    packed   documents of T/2, T/4, ... 16, 16 tokens: a pair    plain: the same, piece by piece, as a model without
             each, the short ones under one mask                 a context axis attends (terrace.model.attention)
    chunks   the causal row in 8 runs of queries and of keys,    plain: as in `causal`
             36 pairs that are merged: the work of a ring of 4
             ranks, all on one

Both take turns in one process, in an order that flips every round; a ratio is the median of the ratios within a round,
with their quartiles, of processor time, which other jobs disturb less than wall time. `difference` is the largest of
output and gradients, relative to the largest element.

Target: at most 3 % more in `causal` and `packed`. `chunks` has none: plain has no merging to do.

To count instructions, `--only` runs one contestant: the difference of two counted runs with different `--rounds` is the
cost of the rounds.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bench.claims import Claim, compared, judge, options_for_claims, print_table, ratio, spread, versioned
from bench.common import alternate
from bench.pair_attention import attend_pairs
from terrace.comm.collectives import DTYPES
from terrace.model.attention import attend
from terrace.model.attention_plans import AttentionPlans
from terrace.model.blockwise import DensePair, dense_mask
from terrace.model.pair_kernels import describe
from terrace.sequence.pairs import Stretch, pairs_within
from terrace.sequence.token_layout import Pair

TARGET = 1.03
HEADER = ("tokens", "dtype", "case", "pairs", "plain ms", "pairs ms", "ratio (quartiles)", "difference", "target")
CASES = ("causal", "packed", "chunks")
NUM_CHUNKS = 8
_BOUND = "short documents share a pair under a mask, whose kernel multiplies queries with unseen keys, too"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def documents_of(case: str, num_tokens: int) -> list[int]:
    """The lengths of the documents of a row."""
    if case != "packed":
        return [num_tokens]
    lengths = [num_tokens // 2]
    while lengths[-1] > 16:
        lengths.append(lengths[-1] // 2)
    return [*lengths, num_tokens - sum(lengths)]


def pairs_of(case: str, num_tokens: int, dtype: torch.dtype) -> list[DensePair]:
    """The pairs of a row."""
    if case == "chunks":
        bounds = [num_tokens * index // NUM_CHUNKS for index in range(NUM_CHUNKS + 1)]
        runs = list(pairwise(bounds))
        return [
            DensePair(run, keys, "causal" if keys == run else "full")
            for index, run in enumerate(runs)
            for keys in runs[: index + 1]
        ]
    begins = [0, *accumulate(documents_of(case, num_tokens))][:-1]
    return [_dense(pair, dtype) for pair in pairs_within([Stretch(0, num_tokens, 0)], begins, 0)]


def _dense(pair: Pair, dtype: torch.dtype) -> DensePair:
    mask = None
    if pair.mask is not None:
        sizes = [stop - start for start, stop in (pair.queries, pair.keys)]
        mask = dense_mask(sizes[0], sizes[1], pair.mask.shift, pair.mask.begins, pair.mask.window, dtype)
    return DensePair(pair.queries, pair.keys, pair.kind, mask)


def contestants(case: str, num_tokens: int, dtype: torch.dtype, tensors: Sequence[Tensor]) -> dict[str, Attend]:
    """Attention of a row, plain and through pairs."""
    positions = torch.cat([torch.arange(size) for size in documents_of(case, num_tokens)])[None]
    plan = AttentionPlans(0).plan(positions, tensors[0])
    pairs = pairs_of(case, num_tokens, dtype)
    return {
        "plain": lambda query, key, value: attend(query, key, value, plan),
        "pairs": lambda query, key, value: attend_pairs(query, key, value, pairs),
    }


def forward_backward(run: Attend, tensors: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    query, key, value = tensors
    out = run(query, key, value)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def measure(case: str, num_tokens: int, dtype: str, options: argparse.Namespace) -> tuple[list[str], Claim | None]:
    """A row of the table, and its claim if it has a target."""
    kind = DTYPES[dtype]
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    generator = torch.Generator().manual_seed(0)
    *tensors, grad = (
        torch.randn(1, num_tokens, num, options.head_dim, generator=generator).to(kind).transpose(1, 2) for num in heads
    )
    for tensor in tensors:
        tensor.requires_grad_()
    runs = contestants(case, num_tokens, kind, tensors)

    def step(name: str, _: int) -> float:
        forward_backward(runs[name], tensors, grad)
        return 0.0

    rounds = max(3, options.rounds * 512 // num_tokens)
    names = [name for name in runs if options.only in (None, name)]
    timings = alternate({name: partial(step, name) for name in names}, rounds, 1, lambda: None)
    if options.only:
        return [], None
    outcomes = {name: forward_backward(run, tensors, grad) for name, run in runs.items()}
    difference = max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(outcomes["pairs"], outcomes["plain"], strict=True)
    )
    plain, pairs = timings["plain"].cpu_s, timings["pairs"].cpu_s
    low, high = spread(pairs, plain)
    name = f"attention by pairs of runs, {case}, {num_tokens} tokens, {dtype}, to the whole"
    claim = compared(name, pairs, plain, TARGET, rival=versioned("torch", "SDPA"), bound=_BOUND)
    row = [f"{num_tokens}", dtype, case, str(len(pairs_of(case, num_tokens, kind)))]
    row += [f"{1e3 * statistics.median(seconds):.2f}" for seconds in (plain, pairs)]
    row += [f"{ratio(pairs, plain):.3f} ({low:.3f}, {high:.3f})", f"{difference:.1e}"]
    # Chunks change what is computed at once, so their time is shown without a target.
    return [*row, "" if case == "chunks" else "met" if claim.is_met else "MISSED"], None if case == "chunks" else claim


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with `--check` return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=80, help="of 512 tokens; of more as many fewer, at least 3")
    parser.add_argument("--only", choices=["plain", "pairs"], help="run one contestant alone and print nothing")
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    claims: list[Claim] = []
    for num_tokens in options.tokens:
        for dtype in options.dtypes:
            print(f"attention pairs: {describe(torch.device('cpu'), DTYPES[dtype])}", file=sys.stderr)
            for case in options.cases:
                row, claim = measure(case, num_tokens, dtype, options)
                rows.append(row)
                claims += [] if claim is None else [claim]
    if options.only:
        return 0
    print_table(HEADER, rows)
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
