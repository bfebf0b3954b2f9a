"""Lists of the parameters of linear layers and norms, with the dims that they declare. Pure: needs no torch."""

from terrace.model.spec import ParamSpec

Dim = tuple[str, int]  # the quantity that a dim counts, and the number of its units


def linear_params(parent: str, sizes: list[tuple[str, Dim, Dim]], bias: bool, head_dim: int) -> list[ParamSpec]:
    """Parameters of the linear layers (name, outputs, inputs) of a module; a head has `head_dim` elements."""
    params: list[ParamSpec] = []

    def size(dim: Dim) -> int:
        return dim[1] * (head_dim if dim[0] in ("heads", "kv_heads") else 1)

    for name, out_dim, in_dim in sizes:
        params.append(
            ParamSpec(name=f"{parent}.{name}.weight", shape=(size(out_dim), size(in_dim)), dims=(out_dim, in_dim))
        )
        if bias:
            params.append(ParamSpec(name=f"{parent}.{name}.bias", shape=(size(out_dim),), dims=(out_dim,)))
    return params


def norm_params(name: str, hidden_size: int, has_bias: bool) -> list[ParamSpec]:
    """Parameters of a norm over the residual stream."""
    parts = ("weight", "bias") if has_bias else ("weight",)
    dims = (("hidden", hidden_size),)
    return [ParamSpec(name=f"{name}.{part}", shape=(hidden_size,), dims=dims) for part in parts]


def head_norm_params(num_heads: int, num_kv_heads: int, head_dim: int, is_whole: bool) -> list[ParamSpec]:
    """Parameters of the norms of queries and keys.

    Their size is one head, shared by all, so that no axis cuts it; with `is_whole` it is that of all heads together.
    """
    params = []
    for name, heads in (("query_norm", ("heads", num_heads)), ("key_norm", ("kv_heads", num_kv_heads))):
        size = heads[1] * head_dim if is_whole else head_dim
        dim = heads if is_whole else ("head_dim", head_dim)
        params.append(ParamSpec(name=f"attention.{name}.weight", shape=(size,), dims=(dim,)))
    return params
