"""Steps of a model that predicts further tokens, on decoder layers of `transformers`; shares no code with Terrace.

The layers behind the last one are loaded from the files that Terrace writes, as layers of a deeper model; their norms,
projection and final norm are put together here, by the equations of DeepSeek-V3 (2412.19437, section 2.2).
"""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.blocks import block_specs
from terrace.model.hf.written import write_pretrained
from tests.support.families import in_fp64, transformers
from tests.support.parity import NUM_STEPS, make_adamw
from tests.support.toys import MODELS, Rows


class Reference(nn.Module):
    """The model in the folder, with `depths` layers for further tokens."""

    def __init__(self, folder: Path, depths: int) -> None:
        super().__init__()
        table = json.loads((folder / "config.json").read_text())
        self.num_layers, self.depths = table["num_hidden_layers"], depths
        deeper = table | {"num_hidden_layers": self.num_layers + depths}
        (folder / "config.json").write_text(json.dumps(deeper))
        transformers.logging.set_verbosity_error()  # it reports the tensors that it does not know
        options = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
        self.whole: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        (stored,) = (safetensors.torch.load_file(path) for path in folder.glob("*.safetensors"))
        self.eps = table["rms_norm_eps"]
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        self.own = nn.ParameterDict(
            {
                f"{k} {name.replace('.', ' ')}": nn.Parameter(
                    stored[f"model.layers.{self.num_layers + k}.{name}.weight"]
                )
                for k in range(depths)
                for name in names
            }
        )

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Logits of one document (1, S): of the next token at each token, then of each further one, (S - k, V)."""
        model, length = self.whole.model, tokens.shape[1]
        x = model.embed_tokens(tokens)
        for layer in model.layers[: self.num_layers]:
            x = self._layer(layer, x)
        x = model.norm(x)
        found = [self.whole.lm_head(x)[0]]
        for k in range(self.depths):
            # h of i = 1 .. S - k - 1 beside the embeddings of the tokens k + 1 later
            x = self._norm(x[:, : length - k - 1], f"{k} hnorm")
            ahead = self._norm(model.embed_tokens(tokens[:, k + 1 :]), f"{k} enorm")
            x = torch.cat((ahead, x), -1) @ self.own[f"{k} eh_proj"].t()
            if x.shape[1]:
                x = self._layer(model.layers[self.num_layers + k], x)
            x = self._norm(x, f"{k} shared_head norm")
            found.append(self.whole.lm_head(x)[0])
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normal: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.own[name]
        return normal

    def _layer(self, layer: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        above = torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
        rotary = self.whole.model.rotary_emb(x, places)
        result: Tensor = layer(x, attention_mask=above, position_ids=places, position_embeddings=rotary)
        return result

    def losses(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Sums of the cross entropies of one document, by depth."""
        found = self(tokens)
        return [
            F.cross_entropy(each, labels[0, k:], reduction="sum", ignore_index=-100) for k, each in enumerate(found)
        ]


def reference_steps(
    name: str, num_rows: int, rows: Rows, weight: float, folder: Path
) -> list[tuple[float, float, float]]:
    """(Loss, mean loss of further tokens, gradient norm) of each step of a toy model, by one process."""
    model = MODELS[name]
    config, blocks = model.config, model.blocks(torch.float64)
    assert config is not None
    values = {
        (spec.name, param.name): block.get_parameter(param.name).detach()
        for spec, block in zip(block_specs(config), blocks, strict=True)
        for param in spec.params
    }
    write_pretrained(folder, config, lambda block, param: values[block, param], "fp64")
    with in_fp64():
        reference = Reference(folder, config.num_mtp_layers)
    parameters = [each for each in reference.parameters() if each.requires_grad]
    optimizer, found = make_adamw(parameters), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with in_fp64():
            main, further, counts = _sums(reference, rows, step, num_rows)
            torch.autograd.backward((main + weight / reference.depths * further) / counts[0])
        norm = float(nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        found.append((float(main.detach() / counts[0]), float(further.detach() / sum(counts[1:])), norm))
    return found


def _sums(reference: Reference, rows: Rows, step: int, num_rows: int) -> tuple[Tensor, Tensor, list[int]]:
    """Losses of the next token and of all further ones, and how many labels count at each depth."""
    whole = rows.batch(step, num_rows)
    losses, counts = list[list[Tensor]](), [0] * (1 + reference.depths)
    for x, y in rows.apart(whole.inputs, whole.labels):
        for row in range(len(x)):
            losses.append(reference.losses(x[row : row + 1], y[row : row + 1]))
            counts = [n + int((y[row, k:] != -100).sum()) for k, n in enumerate(counts)]
    main = torch.stack([each[0] for each in losses]).sum()
    return main, torch.stack([loss for each in losses for loss in each[1:]]).sum(), counts
