"""`terrace upcycle DENSE PATH --experts N`: a mixture of experts from a dense model."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.cli.export import DTYPES, SHARD_BYTES
from terrace.cli.files import check_count
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import num_active_params, num_params
from terrace.model.config import load_model
from terrace.model.facts import family_of, initial_std


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "upcycle",
        description="Make a mixture of experts from the weights of a dense Hugging Face folder: every expert is a copy "
        "of the MLP, or a part of one, and the mixture computes what the dense model computes until it is trained.",
    )
    parser.add_argument("folder", metavar="DENSE", type=Path, help="Hugging Face folder of a dense model")
    parser.add_argument("path", metavar="PATH", type=Path, help="folder to make; it must not be there, or be empty")
    parser.add_argument("--experts", type=int, metavar="N", required=True, help="copies of every MLP")
    parser.add_argument(
        "--per-token", type=int, metavar="K", default=2, help="copies that a token passes (default: %(default)s)"
    )
    parser.add_argument(
        "--parts",
        type=int,
        metavar="G",
        default=1,
        help="cut each copy into G experts, of which a token passes K times G (default: %(default)s)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        metavar="STD",
        help="standard deviation of the router's rows, by which copies get different tokens (default: the model's "
        "initializer_range)",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the rows (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: that of the dense model)")
    parser.add_argument(
        "--shard-bytes", type=int, metavar="N", help=f"largest file of weights, in bytes (default: {SHARD_BYTES})"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Writes the folder; returns 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace upcycle --help")
    check_count("--shard-bytes", options.shard_bytes)
    # After the options are checked: importing torch takes seconds.
    from terrace.model.hf.pretrained import Pretrained, write_pretrained
    from terrace.model.hf.upcycle import Upcycling

    dense = load_model(str(options.folder))
    upcycling = Upcycling(
        num_copies=options.experts,
        per_token=options.per_token,
        num_parts=options.parts,
        noise=initial_std(dense) if options.noise is None else options.noise,
        seed=options.seed,
    )
    made = upcycling.config_of(dense)
    weights = Pretrained(options.folder, dense)
    weights.check()
    dtype = options.dtype or weights.dtype
    written = write_pretrained(
        options.path,
        made,
        upcycling.values(dense, weights.value),
        dtype,
        shard_bytes=options.shard_bytes or SHARD_BYTES,
        source=options.folder,
    )
    config = layer_operations(made).mixture.experts
    experts = counted(config.num_experts, "expert")
    print(
        f"wrote {options.path}, a {family_of(made)} model in {dtype}: {experts} a layer, {config.per_token} for a "
        f"token; {num_params(made):,} parameters, {num_active_params(made):,} for a token, where the dense model has "
        f"{num_params(dense):,}: {', '.join(written)}"
    )
    return 0
