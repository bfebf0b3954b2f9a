"""`terrace upcycle DENSE PATH --experts N`: a mixture of experts from a dense model."""

import argparse
from collections.abc import Sequence

from terrace.base.words import counted
from terrace.cli.files import check_count
from terrace.cli.lines import SHARD_BYTES
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import num_active_params, num_params
from terrace.model.config import load_model
from terrace.model.facts import family_of, initial_std


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    check_count("--shard-bytes", options.shard_bytes)
    # After the options are checked: importing torch takes seconds.
    from terrace.model.hf.pretrained import Pretrained
    from terrace.model.hf.upcycle import Upcycling
    from terrace.model.hf.written import write_pretrained

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
