"""Operations of a decoder's blocks, derived from its configuration. Needs no torch.

The modules of terrace.model.decoder run these operations, with parameters of the same names.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from terrace.model.config import ModelConfig
from terrace.model.hf.keys import CLAMPED
from terrace.model.operations import (
    INPUT,
    OUTPUT,
    Activation,
    Convolution,
    Core,
    Delta,
    Dim,
    Enter,
    Gate,
    Join,
    LookUp,
    Loss,
    Mixture,
    Norm,
    Operation,
    Operations,
    Product,
    Rotary,
    Scale,
    Score,
    Sum,
    Tensor,
    Tokens,
)

Sublayer = Callable[[ModelConfig, Tensor, Tensor], Iterator[Operation]]  # (config, input, output)

SCORE = "score.weight"  # parameter of a scalar head, here and in weight files


@lru_cache(maxsize=256)
def embedding_operations(config: ModelConfig) -> Operations:
    stream, positions = _stream(config), config.max_positions if config.learned_positions else 0
    target = Tensor(OUTPUT, stream)
    look_up = LookUp(
        "look up", (), (target,), "weight", config.vocab_size, positions=positions, factor=config.scales.embedding
    )
    return Operations((look_up,))


@lru_cache(maxsize=256)
def head_operations(config: ModelConfig) -> Operations:
    """Operations of the head: logits and loss, or one number per token with a scalar head."""
    stream, divisor = _stream(config), config.scales.logit_divisor
    ready = Tensor("head input", stream)
    loss = Tensor(OUTPUT, Dim("losses", 1), Tokens.ALL)
    owns, cap = not config.tied_embeddings, config.scales.logit_cap
    if config.num_mtp_layers:
        # The last layers have normalised all representations of a token.
        given = Tensor(INPUT, stream._replace(size=1 + config.num_mtp_layers))
        return Operations((Loss("loss", (given,), (loss,), "weight", config.vocab_size, owns=owns, cap=cap),))
    if config.scalar_head:
        score = Score("score", (ready,), (Tensor(OUTPUT, Dim("scores", 1), Tokens.ALL),), SCORE.removesuffix(".weight"))
        return Operations((_norm(config, "final norm", "norm", Tensor(INPUT, stream), ready), score))
    normalised = ready if divisor == 1.0 else Tensor("normalised", stream)
    found: list[Operation] = [_norm(config, "final norm", "norm", Tensor(INPUT, stream), normalised)]
    if divisor != 1.0:
        found.append(Scale("divide logits", (normalised,), (ready,), 1.0 / divisor))
    return Operations((*found, Loss("loss", (ready,), (loss,), "weight", config.vocab_size, owns=owns, cap=cap)))


@lru_cache(maxsize=256)
def layer_operations(config: ModelConfig) -> Operations:
    """Operations of a layer: attention, then an MLP or a mixture of experts, each added to the residual stream.

    `config` is the configuration of this layer (`ModelConfig.of_layer`).
    """
    stream = _stream(config)
    if not config.num_mtp_layers:
        return Operations(tuple(_layer(config, Tensor(INPUT, stream), Tensor(OUTPUT, stream))))
    result = Tensor("layer output", stream)
    norm = _norm(config, "output norm", "output_norm", result, Tensor(OUTPUT, stream))
    return Operations((*_layer(config, Tensor(INPUT, stream), result), norm))


@lru_cache(maxsize=256)
def further_token_operations(config: ModelConfig, depth: int) -> Operations:
    """Operations of the layer that predicts the token `depth` after the next one (terrace.model.decoder)."""
    stream = _stream(config)
    both, given = Dim("latent", 2 * stream.numel), Tensor(INPUT, stream._replace(size=depth))
    newest = given if depth == 1 else Tensor("newest", stream)
    ahead, own, other = (Tensor(name, stream) for name in ("ahead", "ahead normalised", "newest normalised"))
    joined, combined, result, normal = (
        Tensor("joined", both),
        *(Tensor(name, stream) for name in ("combined", "layer output", "output normalised")),
    )
    factor = config.scales.embedding
    return Operations(
        (
            LookUp("look up", (), (ahead,), "embedding.weight", config.vocab_size, factor=factor, owns=False),
            *(() if depth == 1 else (Join("newest", (given,), (newest,)),)),
            _norm(config, "token norm", "token_norm", ahead, own),
            _norm(config, "hidden norm", "hidden_norm", newest, other),
            Join("join", (own, other), (joined,)),
            Product("combine", (joined,), (combined,), "combine"),
            *_layer(config, combined, result),
            _norm(config, "output norm", "output_norm", result, normal),
            Join("stack", (given, normal), (Tensor(OUTPUT, stream._replace(size=1 + depth)),)),
        )
    )


def _layer(config: ModelConfig, source: Tensor, target: Tensor) -> Iterator[Operation]:
    middle = Tensor("middle", source.features)
    attend = _delta if config.is_linear else _latent_attention if config.latent.key_value_rank else _attention
    feed = _mlp if config.experts is None else _mixture
    # In the parallel form the MLP reads the layer's input, without attention's output.
    second = source if config.parallel_residual else middle
    yield from _sublayer(config, "attention", source, source, middle, "attended", attend)
    yield from _sublayer(config, "mlp", second, middle, target, "mlp output", feed)


def _stream(config: ModelConfig) -> Dim:
    return Dim("hidden", config.hidden_size)


def _sublayer(
    config: ModelConfig, name: str, source: Tensor, added_to: Tensor, target: Tensor, result: str, run: Sublayer
) -> Iterator[Operation]:
    stream, scale = source.features, config.scales.residual
    if config.norms != "after":
        normalised = Tensor(f"{name} input", stream)
        yield _norm(config, f"{name} norm", f"{name}_norm", source, normalised)
        source = normalised
    branch = Tensor(result, stream)
    yield from run(config, source, branch)
    if config.norms != "before":
        normalised = Tensor(f"{name} output normalised", stream)
        yield _norm(config, f"{name} output norm", f"{name}_output_norm", branch, normalised)
        branch = normalised
    if scale != 1.0:
        scaled = Tensor(f"{name} output scaled", stream)
        yield Scale(f"scale {name} output", (branch,), (scaled,), scale, in_sum=True)
        branch = scaled
    yield Sum(f"{name} residual", (added_to, branch), (target,))


def _norm(config: ModelConfig, name: str, weight: str, source: Tensor, target: Tensor) -> Norm:
    return Norm(name, (source,), (target,), weight, source.features, config.norm, config.norm_offset)


def _entered(source: Tensor) -> Enter:
    return Enter(f"gather {source.name}", (source,), (source._replace(name=f"whole {source.name}", tokens=Tokens.ALL),))


def _attention(config: ModelConfig, source: Tensor, target: Tensor) -> Iterator[Operation]:
    enter = _entered(source)
    yield enter
    size = config.head_dim
    heads, kv_heads = Dim("heads", config.num_heads, size), Dim("kv_heads", config.num_kv_heads, size)
    bias, has_rope = config.attention_bias, config.rotary_dim > 0
    ready = {
        name: Tensor(name, of, Tokens.ALL) for name, of in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    }
    rotated: dict[str, Tensor] = {}
    for name, result in ready.items():
        # Operations applied to the projection, in this order: norm, scale, RoPE.
        stages = []
        if config.qk_norm and name != "value":
            stages.append("norm")
        if config.query_factor != 1.0 and name == "query":
            stages.append("scale")
        if has_rope and name != "value":
            stages.append("RoPE")
        tensors = [*(result._replace(name=f"{name} before {stage}") for stage in stages), result]
        yield Product(
            name, (enter.target,), (tensors[0],), f"attention.{name}", bias or config.qkv_bias, group="attention"
        )
        for stage, before, after in zip(stages, tensors[:-1], tensors[1:], strict=True):
            if stage == "norm":
                over = result.features if config.whole_qk_norm else Dim("head_dim", size)
                weight = f"attention.{name}_norm"
                yield Norm(f"{name} norm", (before,), (after,), weight, over, has_offset=config.norm_offset)
            elif stage == "scale":
                yield Scale("scale query", (before,), (after,), config.query_factor)
            else:
                rotated[name] = before
    gate = Tensor("gate of heads", heads, Tokens.ALL)
    if config.attention_gate:
        yield Product("gate of heads", (enter.target,), (gate,), "attention.gate", bias, group="attention")
    if has_rope:
        yield Rotary(
            "RoPE",
            (rotated["query"], rotated["key"]),
            (ready["query"], ready["key"]),
            dim=config.rotary_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            limit=config.rope_limit,
        )
    mixed = Tensor("mixed", heads, Tokens.ALL)
    yield Core(
        "attention",
        tuple(ready.values()),
        (mixed,),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=size,
        value_dim=size,
        window=config.sliding_window,
        cap=config.scales.attention_cap,
        sinks="attention.sinks" if config.has_sinks else "",
    )
    holds: tuple[str, ...] = (enter.target.name, *ready)
    if config.attention_gate:
        mixed, ungated = Tensor("gated", heads, Tokens.ALL), mixed
        yield Gate("gate attention", (gate, ungated), (mixed,), "sigmoid")
        holds = (*holds, gate.name)
    yield Product("attention output", (mixed,), (target,), "attention.output", bias, holds=holds)


def _delta(config: ModelConfig, source: Tensor, target: Tensor) -> Iterator[Operation]:
    """The operations of terrace.model.delta_net. Key heads are cut, and shared, as key-value heads are."""
    enter, sizes = _entered(source), config.delta
    yield enter
    keys, values = Dim("kv_heads", sizes.key_heads, sizes.key_dim), Dim("heads", sizes.value_heads, sizes.value_dim)
    numbers, decays = (Dim("heads", sizes.value_heads, size) for size in (1, sizes.num_decays // sizes.value_heads))
    inputs = {"query": keys, "key": keys, "value": values, "gate": values, "beta": numbers, "decay": decays}
    into = {name: Tensor(name, of, Tokens.ALL) for name, of in inputs.items()}
    into["gate"] = Tensor("gate of heads", values, Tokens.ALL)  # an MLP has another gate
    for name, result in into.items():
        source = enter.target
        if sizes.rank and name in ("gate", "decay"):
            source = Tensor(f"{name} down", Dim("latent", sizes.rank), Tokens.ALL)
            yield Product(source.name, (enter.target,), (source,), f"attention.{name}_down", group="attention")
        group = "attention" if source is enter.target else ""
        yield Product(name, (source,), (result,), f"attention.{name}", group=group)
    convolved = []
    for name in ("query", "key", "value"):
        convolved.append(into[name]._replace(name=f"{name} convolved"))
        yield Convolution(f"convolve {name}", (into[name],), (convolved[-1],), f"attention.{name}_conv", sizes.taps)
    mixed, normed, gated = (Tensor(name, values, Tokens.ALL) for name in ("mixed", "mixed normalised", "gated"))
    yield Delta(
        "delta rule",
        (*convolved, into["decay"], into["beta"]),
        (mixed,),
        heads=sizes.value_heads,
        key_heads=sizes.key_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        taps=sizes.taps,
        log_decay="attention.log_decay",
        decay_bias="attention.decay_bias",
    )
    yield Norm("norm of heads", (mixed,), (normed,), "attention.norm", Dim("head_dim", sizes.value_dim))
    yield Gate("gate heads", (into["gate"], normed), (gated,), "sigmoid" if sizes.rank else "silu")
    yield Product("attention output", (gated,), (target,), "attention.output")


def _latent_attention(config: ModelConfig, source: Tensor, target: Tensor) -> Iterator[Operation]:
    """The operations of terrace.model.latent_attention. No axis shards a latent."""
    enter, latent, bias = _entered(source), config.latent, config.attention_bias
    yield enter
    unshared, has_rope = config.head_dim - latent.shared_dim, config.rotary_dim > 0
    heads, values = Dim("heads", config.num_heads, config.head_dim), Dim("heads", config.num_heads, latent.value_dim)
    query, key, value = (Tensor(name, heads, Tokens.ALL) for name in ("query", "key", "value"))
    compressed = Tensor("compressed", Dim("latent", latent.key_value_rank + latent.shared_dim), Tokens.ALL)
    normed = Tensor("key-value latent", Dim("latent", latent.key_value_rank), Tokens.ALL)
    expanded = Tensor("expanded", Dim("heads", config.num_heads, unshared + latent.value_dim), Tokens.ALL)
    scaled = config.query_factor != 1.0
    ready = query._replace(name="query before scale") if scaled else query
    before = query._replace(name="query before RoPE") if has_rope else ready
    shared = Tensor("key rotated", Dim("latent", latent.shared_dim), Tokens.ALL) if has_rope else compressed
    down = Tensor("query down", Dim("latent", latent.query_rank), Tokens.ALL)
    ranked = down._replace(name="query latent")
    if latent.query_rank:
        yield Product("query down", (enter.target,), (down,), "attention.query_down", bias)
    else:
        yield Product("query", (enter.target,), (before,), "attention.query")
    yield Product("key-value down", (enter.target,), (compressed,), "attention.key_value_down", bias)
    if latent.query_rank:
        yield Norm("query latent norm", (down,), (ranked,), "attention.query_latent_norm", ranked.features)
        yield Product("query", (ranked,), (before,), "attention.query_up")
    yield Norm("key-value norm", (compressed,), (normed,), "attention.key_value_norm", normed.features)
    yield Product("key-value up", (normed,), (expanded,), "attention.key_value_up")
    theta, scaling = config.rope_theta, config.rope_scaling
    if has_rope:
        yield Rotary(
            "RoPE", (before, compressed), (ready, shared), config.rotary_dim, theta, scaling, config.rope_limit
        )
    yield Join("join key", (expanded, shared), (key,))
    yield Join("fill value", (expanded,), (value,))
    if scaled:
        yield Scale("scale query", (ready,), (query,), config.query_factor)
    mixed = cut = query._replace(name="mixed")
    yield Core(
        "attention",
        (query, key, value),
        (mixed,),
        heads=config.num_heads,
        kv_heads=config.num_heads,
        head_dim=config.head_dim,
        value_dim=latent.value_dim,
        latent=Tensor(
            "latent and key rotated", Dim("latent", 1, latent.key_value_rank + latent.shared_dim), Tokens.ALL
        ),
    )
    if latent.value_dim < config.head_dim:
        cut = Tensor("values mixed", values, Tokens.ALL)
        yield Join("merge values", (mixed,), (cut,))
    yield Product(
        "attention output",
        (cut,),
        (target,),
        "attention.output",
        bias,
        holds=(enter.target.name, "query", "key", "value"),
    )


def _mlp(config: ModelConfig, source: Tensor, target: Tensor) -> Iterator[Operation]:
    yield from _feed_forward(config, source, target, "mlp", config.intermediate_size)


def _feed_forward(
    config: ModelConfig, source: Tensor, target: Tensor, weight: str, size: int, prefix: str = ""
) -> Iterator[Operation]:
    """An MLP of inner size `size`; `prefix` is put before the names of its operations and tensors."""
    enter = _entered(source)
    yield enter
    inner, bias = Dim("intermediate", size), config.mlp_bias
    up, gate, product = (Tensor(f"{prefix}{name}", inner, Tokens.ALL) for name in ("up", "gate", "product"))
    operands: tuple[Tensor, ...] = (up,)
    if config.gated_mlp:
        yield Product(f"{prefix}gate", (enter.target,), (gate,), f"{weight}.gate", bias, group=weight)
        operands = (gate, up)
    yield Product(f"{prefix}up", (enter.target,), (up,), f"{weight}.up", bias, group=weight)
    yield Activation(f"{prefix}activation", operands, (product,), config.activation)
    holds = (enter.target.name, *(each.name for each in reversed(operands)))
    yield Product(f"{prefix}down", (product,), (target,), f"{weight}.down", bias, holds=holds)


def _mixture(config: ModelConfig, source: Tensor, target: Tensor) -> Iterator[Operation]:
    experts = config.own_experts
    hidden, inner = source.features, Dim("expert_intermediate", experts.intermediate_size)
    rows, results = (Tensor(name, hidden, Tokens.ROWS) for name in ("rows", "expert outputs"))
    gate, up, product = (Tensor(name, inner, Tokens.ROWS) for name in ("gate", "up", "product"))
    number, bias = experts.num_experts, experts.has_biases
    each = (
        Product("gate", (rows,), (gate,), "mlp.gate", bias, group="experts", stack=number),
        Product("up", (rows,), (up,), "mlp.up", bias, group="experts", stack=number),
        Activation("activation", (gate, up), (product,), config.activation, config.activation == CLAMPED),
        Product("down", (product,), (results,), "mlp.down", bias, stack=number),
    )
    shared: tuple[Operation, ...] = ()
    shared_gate: tuple[Product, ...] = ()
    if experts.shared_size:
        result = Tensor("shared output", hidden)
        shared = tuple(_feed_forward(config, source, result, "mlp.shared", experts.shared_size, "shared "))
    if experts.shared_gate:
        number_of_token = Tensor("gate of shared", Dim("shared_gate", 1))
        shared_gate = (Product("gate of shared", (source,), (number_of_token,), "mlp.shared_gate"),)
    yield Mixture("experts", (source,), (target,), experts, "mlp", each, shared, shared_gate)
