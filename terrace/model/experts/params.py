"""The parameters of a router, as terrace.model.experts.mixture has them. Pure: needs no torch."""

from terrace.model.experts.config import ExpertsConfig
from terrace.model.params import ParamSpec

Dim = tuple[str, int]  # the quantity that a dim counts, and its size


def router_params(experts: ExpertsConfig, hidden: Dim) -> list[ParamSpec]:
    """The parameters of the router of a mixture for tokens of size `hidden`, in order; the bias is no optimizer's."""
    choices, size = ("choices", experts.num_experts), ("router", experts.router_size)
    dims: dict[str, tuple[Dim, ...]] = {"weight": (choices, size if experts.router_size else hidden)}
    if experts.gate == "noisy":
        dims["noise"] = (choices, hidden)
    if experts.gate == "cosine":
        dims |= {"projection": (size, hidden), "temperature": (("temperature", 1),)}
    if experts.biased:
        dims["bias"] = (choices,)
    return [
        ParamSpec(
            name=f"mlp.router.{name}",
            shape=tuple(each for _, each in of),
            dims=of,
            trainable=name != "bias",
            is_moved=name == "bias",
        )
        for name, of in dims.items()
    ]
