"""`terrace data lengths`: document lengths of a corpus, and what the balance policies cost on them."""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from terrace.base.errors import ConfigError, DataError
from terrace.base.schema import merge
from terrace.base.words import counted
from terrace.cli.files import check_count, check_not_read, check_writable, write_file
from terrace.cli.here import cluster_here
from terrace.cli.options import flags
from terrace.cli.overrides import parse_overrides, take_word
from terrace.cli.task import faster_dtype
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.lab.policies.costs import policy_costs
from terrace.lab.policies.tables import bins_of, histogram_table, lengths_svg, policies_table
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.distributions import batches, scattered
from terrace.sequence.lengths import DISTRIBUTIONS
from terrace.simulate.attention_cost import attention_cost

_MOST_PLACES = 4096  # documents of this many ranks are assigned in about a second
_MOST_DOCUMENTS = 200_000  # of a batch, for the same reason


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the histogram and the cost of each policy; returns 0."""
    path, rest = take_word(rest)
    if path is not None and options.data is not None:
        raise ConfigError(f"{path} and --data {options.data} both name the corpus: leave one out")
    path = options.data if path is None else path
    if (path is None) == (options.distribution is None):
        raise ConfigError("give either a PATH or --distribution NAME; see terrace data lengths --help")
    for option in ("sequence", "batch"):
        check_count(f"--{option}", getattr(options, option), bits=31)
    if options.picture is not None:
        check_writable("--picture", options.picture)
        if options.picture.suffix != ".svg":
            raise ConfigError(f"--picture {options.picture}: it is written as SVG; name a file that ends in .svg")
    if options.out is not None:
        check_writable("--out", options.out)
        check_not_read("--out", options.out, {"corpus": path, "model": options.model, "cluster": options.cluster})
    # All input is checked before the corpus is read, which may take minutes.
    model, cluster, data = _described(options, path, rest)
    if cluster.world_size > _MOST_PLACES:
        raise ConfigError(
            f"cluster {cluster.name!r} has {cluster.world_size} ranks, and up to {_MOST_PLACES} are assigned together: "
            f"resize a tier, for example --cluster.tiers.{cluster.tiers[-1].name}.size 4"
        )
    num_sequences = options.batch or cluster.world_size
    name, lengths = _lengths(options, data)
    batch = _batch(lengths, num_sequences, options.sequence)
    # Buffers are sized for an even share of the tokens, as in a run.
    share, compute = math.ceil(num_sequences * options.sequence / cluster.world_size), faster_dtype(cluster)
    capacity, cost = (
        ring_rank_capacity(batch, cluster.world_size, share),
        attention_cost(cluster, block_specs(model), compute=compute),
    )
    costs = policy_costs(batch, [tier.size for tier in cluster.tiers], cost, capacity)
    bins = bins_of(lengths)
    if options.picture is not None:  # before any output, so that a write error is not lost below tables
        write_file("--picture", options.picture, lengths_svg(bins, f"lengths of documents of {name}"))
    if options.out is not None:
        pieces = _pieces(lengths, options.sequence)
        write_file("--out", options.out, "".join(f"{length}\n" for length in pieces))
    console = Terminal()
    print(
        f"{name}: {counted(len(lengths), 'document', ',')}, {counted(sum(lengths), 'token', ',')}, the longest "
        f"{max(lengths):,}\n"
    )
    console.print(histogram_table(bins))
    tiers = " x ".join(f"{tier.size} {tier.name}" for tier in reversed(cluster.tiers))
    print(
        f"\n{counted(num_sequences, 'sequence')} x {counted(options.sequence, 'token')} on cluster {cluster.name}, "
        f"{tiers}: {counted(cluster.world_size, 'rank')} that attend together in {compute}\n"
        f"a batch of them: {counted(len(batch), 'document', ',')}, the longest {counted(max(batch), 'token', ',')}\n"
    )
    console.print(policies_table(costs, [tier.name for tier in cluster.tiers]))
    num_cut = sum(length > options.sequence for length in lengths)
    cut = f"; cut, since longer than a sequence: {counted(num_cut, 'document', ',')}" * bool(num_cut)
    print(f"bytes are sums over all ranks{cut}")
    if options.picture is not None:
        print(f"wrote {options.picture}")
    if options.out is not None:
        print(f"wrote {options.out}: {counted(len(pieces), 'length', ',')} for --lengths of terrace simulate and plan")
    return 0


def _described(
    options: argparse.Namespace, path: str | None, rest: Sequence[str]
) -> tuple[ModelConfig, Cluster, Mapping[str, Any]]:
    from terrace.train.layers import resolve_table

    overrides = parse_overrides(rest, of_run=False)
    for section, value in overrides.items():
        if section not in ("data", "cluster") or not isinstance(value, Mapping):
            raise ConfigError(f"--{section}: only keys of the data and of the cluster can be set; see --help")
    own = {"cluster": overrides["cluster"]} if "cluster" in overrides else {}
    table = resolve_table(None, flags(options, "model", "cluster"), own, cluster_here)
    # No option is ignored silently.
    if options.distribution is not None and "data" in overrides:
        raise ConfigError("--data has no effect on --distribution: leave it out, or give a PATH")
    if "path" in overrides.get("data", {}):
        raise ConfigError("--data.path has no effect with PATH: leave it out")
    data = merge({"path": path}, dict(overrides.get("data", {}))) if path is not None else {}
    return parse_model(table["model"]), parse_cluster(table["cluster"]), data


def _lengths(options: argparse.Namespace, data: Mapping[str, Any]) -> tuple[str, Sequence[int]]:
    if options.distribution is not None:
        return options.distribution, DISTRIBUTIONS[options.distribution](options.sequence)
    # Imported here: a built-in distribution needs neither numpy nor a tokenizer.
    import numpy as np

    from terrace.base.schema import load
    from terrace.data.config import DataConfig
    from terrace.data.documents import open_documents
    from terrace.data.found_format import with_formats
    from terrace.data.prepared import prepare_sources
    from terrace.data.tokenizer import load_tokenizer

    config = load(DataConfig, with_formats(data), "data")
    sources = prepare_sources(config, load_tokenizer(config.tokenizer, config.bos, config.eos), options.sequence, print)
    found: list[int] = []
    for source in sources:
        documents = open_documents(source.tokens, source.name)
        # Starts of consecutive documents differ by their lengths; the last ends with the tokens.
        found += np.diff(documents.starts, append=len(documents.ids)).tolist()
    found = [length for length in found if length]
    if not found:
        raise DataError(f"{config.path} has no document with a token: give another path")
    return " and ".join(source.name for source in sources), found


def _batch(lengths: Sequence[int], num_sequences: int, sequence: int) -> tuple[int, ...]:
    # A fair sample of all documents; longer ones are cut into sequences.
    pieces = scattered(_pieces(lengths, sequence))
    num_documents = num_sequences * sequence * len(pieces) // sum(pieces)
    if num_documents > _MOST_DOCUMENTS:
        raise ConfigError(
            f"{counted(num_sequences, 'sequence')} x {counted(sequence, 'token')} are about {num_documents:,} of these "
            f"documents, and up to {_MOST_DOCUMENTS:,} are assigned together: lower --batch or --sequence"
        )
    return batches(num_sequences * sequence, 1, pieces)[0]


def _pieces(lengths: Sequence[int], sequence: int) -> list[int]:
    return [min(sequence, length - start) for length in lengths for start in range(0, length, sequence)]
