"""Words that name the kernel of attention that serves a run."""

import torch

from terrace.comm.collectives import DTYPES
from terrace.model import pair_kernels
from terrace.model.attention_plans import describe
from terrace.plan.context import is_context_parallel
from terrace.plan.mesh import Mesh
from terrace.train.config import RunConfig
from terrace.train.rules import attention_case


def attention_words(run: RunConfig, device: torch.device) -> str:
    """The kernel on a device, after a trial there; raises `ConfigError` where the one that the run names fails it."""
    dtype = DTYPES[run.plan.compute]
    if is_context_parallel(Mesh.of(run.cluster, run.plan), run.plan):
        return f"attention pairs: {pair_kernels.describe(device, dtype)}"
    case = attention_case(run, device.type)
    options = {"is_grouped": case.is_grouped, "is_cut": case.is_cut, "is_capped": case.is_capped}
    return f"attention: {describe(device, dtype, case.head_dim, **options, choice=run.train.attention)}"
