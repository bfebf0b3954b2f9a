"""FSMoE (2501.10714): the parts of a mixture's layer on bed B, from the links that the paper fits.

The layer is the paper's: its ranks of a node are tensor ranks of attention and cut every expert, its nodes hold
different experts. An expert takes `capacity` times its even share of tokens, padded; `per_token` experts a token.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from bench.validation.bandwidth import gather_s
from bench.validation.rows import Row, Table, read_rows
from terrace.cluster.cluster import Cluster, Device, Kernels, Tier
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import FORMATS, MessageClass
from terrace.simulate.kernels import attention_s, gemm_s
from terrace.simulate.links import hop_s

NODES, GPUS = 8, 4
INSIDE, BETWEEN = 0, 1  # tiers
_ITEM = 4  # fp32
_PER_TOKEN = 2

# Fits of the paper's table of bed B, alpha in s and beta in s a byte (a multiply-add for products). Its fits of
# reductions and all-reduces are not used: a reduction takes as long as a gather, an all-reduce as both.
_GEMM = 9.24e-5, 3 * 4.42e-14  # three times the printed beta, which is 45 TFLOP/s in fp32 on a device of 13
_EXCHANGE = 1.75e-4, 3.06e-10
_GATHER = 3.20e-5, 1.68e-10

_TEXT = """
Milliseconds of the parts of a layer, forward and backward, in fp32: volumes of `terrace.plan.expert_traffic`, links of
`terrace.simulate.links` and products of `terrace.simulate.kernels` with the constants that the paper fits to single
messages and products on the same machines: all-to-alls for the tier between nodes, gathers for the tier inside. Its
fits of reductions and all-reduces are not used. **The printed beta of products is taken three times**: as printed it is
45 TFLOP/s, more than three times the peak of the device. Capacity is 1.2, two experts a token.
Exchanges and gradients between nodes are 9 to 19 % low, most of all where both are under way in one backward.
"""


def _tier(name: str, size: int, alpha_s: float, beta_s: float) -> Tier:
    # alpha + n beta of n whole bytes, of which a rank sends all parts but one.
    return Tier(
        name=name,
        size=size,
        bandwidth_bytes_per_s=(size - 1) / size / beta_s,
        latency_s=alpha_s / (size - 1),
    )


_DEVICE = Device(
    name="RTX 2080 Ti",
    memory_bytes=11e9,
    memory_bandwidth_bytes_per_s=616e9,  # NVIDIA's data sheet
    peak_flops_per_s={"fp32": 2 / _GEMM[1]},
    kernels=Kernels(launch_s=_GEMM[0]),
)
# The alphas of messages hold their launches.
BED_B = Cluster(
    name="FSMoE's bed B",
    device=replace(_DEVICE, kernels=Kernels()),
    tiers=(_tier("node", GPUS, *_GATHER), _tier("system", NODES, *_EXCHANGE)),
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention and a mixture; tokens are those of a node."""

    sequences: int
    sequence: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    products: int  # of an expert: 2, or 3 if gated
    capacity: float = 1.2

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence

    @cached_property
    def traffic(self) -> ExpertTraffic:
        """Experts of a rank whose tokens are those that capacity leaves room for: padding travels too."""
        return ExpertTraffic(
            tokens=round(self.capacity * self.tokens / GPUS),
            num_experts=NODES,
            per_token=_PER_TOKEN,
            num_choices=_PER_TOKEN,
            hidden=self.hidden,
            item_bytes=_ITEM,
            weight_bytes=_ITEM,
            dispatch=(FORMATS["fp32"],) * 2,
            combine=(FORMATS["fp32"],) * 2,
            expert=(1, NODES),
            rows=(GPUS, 1),
        )

    def message_s(self, message: MessageClass, tier: int, chunks: int = 1) -> float:
        """Seconds of a chunk's hop to experts or back."""
        traffic = self.traffic
        ((_, num_bytes),) = traffic.sends(RoutedMessage(message, tier, copies=tier == INSIDE))
        return hop_s(BED_B, tier, (traffic.rows if tier == INSIDE else traffic.expert)[tier], num_bytes / chunks)

    def products_s(self, chunks: int = 1) -> float:
        """Seconds of the products of a chunk, or of its input gradients, or of its weight gradients."""
        rows = round(self.capacity * _PER_TOKEN * self.tokens / chunks)
        return self.products * _product_s(rows, self.hidden, self.inner // GPUS)

    @property
    def attention_numel(self) -> float:
        """Elements of attention's matrices on a rank."""
        return 2 * self.hidden**2 * (1 + self.kv_heads / self.heads) / GPUS

    @property
    def gradient_s(self) -> float:
        """Seconds of the all-reduce of attention's gradients among nodes."""
        return 2 * gather_s(BED_B, (1, NODES), self.attention_numel * _ITEM)

    @property
    def stream_s(self) -> float:
        """Seconds of a gather of the tokens of a node, for attention; a reduction takes as long."""
        return gather_s(BED_B, (GPUS,), self.tokens * self.hidden * _ITEM)

    @property
    def attention_s(self) -> tuple[float, float]:
        """(Forward, backward) seconds of attention, whose scores are written."""
        device, heads = _DEVICE, self.heads // GPUS
        core = attention_s(
            device,
            batch=self.sequences,
            heads=heads,
            queries=self.sequence,
            keys=self.sequence,
            head_dim=self.hidden // self.heads,
            flash=False,
            dtype="fp32",
        )
        widths = (heads, heads * self.kv_heads // self.heads, heads * self.kv_heads // self.heads, heads)
        products = sum(_product_s(self.tokens, self.hidden, width * self.hidden // self.heads) for width in widths)
        return products + core[0], 2 * products + core[1]


def _product_s(rows: int, inputs: int, outputs: int) -> float:
    return gemm_s(_DEVICE, rows, inputs, outputs, 1, "fp32")


GPT2_XL = Layer(
    sequences=4, sequence=1024, hidden=1600, heads=25, kv_heads=25, inner=6400, products=2
)  # its 25 heads are dealt to ranks of 6 and 7
MIXTRAL = Layer(sequences=4, sequence=1024, hidden=4096, heads=32, kv_heads=8, inner=14336, products=3)


def table() -> Table:
    """The parts of both layers on bed B beside the published ones."""
    layers, rows = {"GPT2-XL": GPT2_XL, "Mixtral-7B": MIXTRAL}, []
    for line in read_rows("fsmoe_bed_b.csv"):
        layer = layers[line["model"]]
        there, back = MessageClass.DISPATCH, MessageClass.COMBINE
        parts_s = {
            "exchange": layer.message_s(there, BETWEEN) + layer.message_s(back, BETWEEN),
            "gradient": layer.gradient_s,
            "gather": layer.message_s(there, INSIDE) + layer.stream_s,
            "reduce": layer.message_s(back, INSIDE) + layer.stream_s,
            "experts": layer.products_s() * (2 if line["phase"] == "backward" else 1),
        }
        rows += [
            Row(cells=(line["model"], line["phase"], part), published=float(line[part]), modelled=1e3 * seconds)
            for part, seconds in parts_s.items()
            if float(line[part])
        ]
    return Table(
        title="FSMoE, parts of a layer",
        text=_TEXT,
        heads=("model", "pass", "part"),
        unit="ms",
        rows=rows,
        mean_limit=0.08,
        max_limit=0.22,
    )
