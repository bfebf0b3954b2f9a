"""The contestants, and the settings of each that the lab tries; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from terrace.plan.presets import PRESETS

ACCUMS = (1, 4)  # sequences of a rank and step
TRIED_ACCUM = ACCUMS[-1]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting of a contestant: how a step's sequences are cut into micro-batches, and arguments of its adapter."""

    micro_batch: int  # sequences; all of a step where it has fewer
    words: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    inter_node: str = ""  # which formula of `floor` holds; empty: the contestant's

    @property
    def name(self) -> str:
        cut = f"{TRIED_ACCUM // self.micro_batch} x {self.micro_batch}"
        return f"{cut}, {self.words}" if self.words else cut

    def cut(self, accum: int) -> int:
        """Sequences of a micro-batch in steps of `accum`."""
        return min(self.micro_batch, accum)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant: its name in results and tables, its adapter, the adapter's arguments, and its trials."""

    name: str
    label: str
    adapter: str  # module under bench.lab
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: str  # what all of its trials share, in words, for the page
    inter_node: str  # which formula of `floor` holds
    trials: tuple[Trial, ...]
    accums: tuple[int, ...] = ACCUMS
    is_central: bool = False  # in a target or next to it: measured on all links and in every round

    @property
    def is_ours(self) -> bool:
        """Whether Terrace runs it."""
        return self.adapter == "terrace_plans"

    def trial(self, name: str) -> Trial:
        return next(trial for trial in self.trials if trial.name == name)

    def arguments(self, trial: Trial) -> dict[str, Any]:
        """Arguments of the adapter under a trial."""
        return {**self.options, **trial.options}

    def absence(self) -> str:
        """Why it cannot run here, or ""."""
        if self.adapter == "deepspeed_zero" and find_spec("deepspeed") is None:
            return "DeepSpeed is not installed: install the extra `lab`, with DS_BUILD_OPS=0"
        if self.is_ours and self.options["preset"] not in PRESETS:
            return f"this version of Terrace has no preset {self.options['preset']!r} yet"
        return ""


def _fsdp(
    name: str, label: str, settings: str, inter_node: str, *more: Trial, is_central: bool = False, **options: Any
) -> Entry:
    trials = (
        Trial(micro_batch=4, words="next block prefetched"),
        Trial(micro_batch=4, words="next two blocks prefetched", options={"prefetch": 2}),
        Trial(micro_batch=4, words="two blocks a message", options={"fused": 2}),
        *more,
    )
    return Entry(
        name=name,
        label=label,
        adapter="fsdp",
        options=options,
        settings=f"{_FSDP}, {settings}",
        inter_node=inter_node,
        trials=trials,
        is_central=is_central,
    )


def _split(whole: Entry) -> Entry:
    """The same contestant with one sequence a micro-batch, every message in each."""
    return Entry(
        name=f"{whole.name} x{TRIED_ACCUM}",
        label=f"{whole.label}, {TRIED_ACCUM} micro-batches",
        adapter=whole.adapter,
        options=whole.options,
        settings=f"{whole.settings}; a micro-batch is one sequence, each has its gathers and its reduction",
        inter_node=whole.inter_node,
        trials=(Trial(micro_batch=1, words="next block prefetched"),),
        accums=(TRIED_ACCUM,),
        is_central=True,
    )


def _deepspeed(name: str, label: str, settings: str, inter_node: str, *trials: Trial, **options: Any) -> Entry:
    return Entry(
        name=name,
        label=label,
        adapter="deepspeed_zero",
        options=options,
        settings=settings,
        inter_node=inter_node,
        trials=trials,
    )


def _ours(preset: str, settings: str, inter_node: str, is_central: bool = False) -> Entry:
    near, far = Trial(micro_batch=4, words="prefetch 1"), {"plan": {"prefetch": _ALL_AHEAD}}
    trials = [near, Trial(micro_batch=4, words="all blocks gathered ahead and kept", options=far)]
    if is_central:
        trials.append(Trial(micro_batch=1, words="unit 4", options={"plan": {"unit": 4}}))
    return Entry(
        name=f"terrace {preset}",
        label=f"Terrace {preset.replace('-compressed', ', compressed')}",
        adapter="terrace_plans",
        options={"preset": preset},
        settings=settings,
        inter_node=inter_node,
        trials=tuple(trials),
        is_central=is_central,
    )


_ALL_AHEAD = 30  # visits: more than the forward and the backward of all blocks
_FSDP = "fully_shard on every block and the root, bf16 compute and wire, fp32 master"
_DEEPSPEED = "persistence threshold 0, reuse distance 0"
_LIMITS = "live and prefetch limits of {} and {} M parameters"
_SMALL = Trial(micro_batch=4, words=_LIMITS.format(4, 2))
_LARGE = Trial(micro_batch=4, words=_LIMITS.format(8, 4), options={"live": 8_000_000, "prefetch": 4_000_000})
_COMPRESSED = "int8 new weights and int4 gradients on all tiers but the package, with error feedback between nodes"
_KEPT = Trial(
    micro_batch=4,
    words="parameters kept for the backward",
    options={"keep": "backward"},
    inter_node="flat, kept for the backward",
)
_ONCE = Trial(
    micro_batch=1,
    words="parameters kept and gradients deferred to the last micro-batch",
    options={"keep": "step"},
    inter_node="flat, once a step",
)
_HSDP_KEPT, _HSDP_ONCE = (
    Trial(micro_batch=each.micro_batch, words=each.words, options=each.options) for each in (_KEPT, _ONCE)
)
_ZERO3 = _fsdp("zero3", "FSDP2 ZeRO-3", "over all ranks", "flat zero3", _KEPT, _ONCE)
_HSDP = _fsdp(
    "hsdp",
    "FSDP2 HSDP",
    "mesh of nodes x ranks of a node, all-reduce in the last micro-batch only",
    "two crossings",
    _HSDP_KEPT,
    _HSDP_ONCE,
    is_central=True,
    mesh="hybrid",
)
CONTESTANTS = (
    Entry(
        name="compute",
        label="compute alone",
        adapter="compute",
        settings="a plain loop in every rank, bf16 compute, no message; a rank updates its share of the fp32 masters, "
        "so that all ranks together update each parameter once",
        inter_node="none",
        trials=(Trial(micro_batch=4), Trial(micro_batch=1)),
        is_central=True,
    ),
    Entry(
        name="ddp",
        label="DDP",
        adapter="ddp",
        settings="DDP under bf16 autocast, gradients compressed to bf16 by its hook, `no_sync` but in the last "
        "micro-batch, gradients as views of the buckets",
        inter_node="flat, once a step",
        trials=(
            Trial(micro_batch=4, words="buckets of 25 MB"),
            Trial(micro_batch=4, words="buckets of 6 MB", options={"bucket_mb": 6}),
        ),
    ),
    _ZERO3,
    _split(_ZERO3),
    _fsdp(
        "hpz",
        "FSDP2 hpZ",
        "over all ranks, `reshard_after_forward` = ranks of a node",
        "flat, kept for the backward",
        reshard="node",
    ),
    _HSDP,
    _split(_HSDP),
    _deepspeed("deepspeed zero3", "DeepSpeed ZeRO-3", f"stage 3, {_DEEPSPEED}", "flat zero3", _SMALL, _LARGE),
    _deepspeed(
        "deepspeed zero3 hpz",
        "DeepSpeed ZeRO-3 hpZ",
        f"stage 3 with `zero_hpz_partition_size` = ranks of a node, {_DEEPSPEED}",
        "deepspeed hpz",
        _SMALL,
        _LARGE,
        hpz=True,
    ),
    _deepspeed(
        "deepspeed zero++",
        "DeepSpeed ZeRO++",
        "hpz, and `zero_quantized_weights`, `zero_quantized_gradients`",
        "deepspeed zero++",
        _SMALL,
        hpz=True,
        quantized=True,
    ),
    _ours("zero3", "params, grads and optimizer over all ranks", "tiered zero3"),
    _ours("hsdp", "params, grads and optimizer on the node", "two crossings"),
    _ours(
        "zero++",
        "ZeRO-3, int8 gathers, a copy on the node for later ones, int4 gradients in every micro-batch",
        "tiered zero++, int8 and int4",
    ),
    _ours(
        "three-level",
        "params on the package, grads on the node, optimizer over all ranks; bf16",
        "two crossings",
        is_central=True,
    ),
    _ours(
        "three-level-compressed",
        f"the same placement; {_COMPRESSED}",
        "two crossings, int8 and int4",
        is_central=True,
    ),
)


def contestant(name: str) -> Entry:
    return next(entry for entry in CONTESTANTS if entry.name == name)
