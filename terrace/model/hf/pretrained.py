"""Reads the weights of Hugging Face folders.

Reading is lazy: opening a folder reads its index and `value` one parameter, so a pipeline rank reads only its own
layers. Values keep their stored dtype.

Shape legend: G groups.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.foreign import check_file
from terrace.model.block_operations import SCORE
from terrace.model.config import MOST_FURTHER_TOKENS, ModelConfig, load_model
from terrace.model.dcp.reading import DcpWeights
from terrace.model.hf.checksums import Checksums
from terrace.model.hf.families import FAMILIES
from terrace.model.hf.folder import CONFIG, METADATA, SINGLE, is_dcp, weight_files
from terrace.model.hf.keys import NEXTN, PROJECTION
from terrace.model.hf.misfit import misfit_words
from terrace.model.hf.mxfp4 import PACKED, PackedWeights
from terrace.model.hf.names import DERIVED, NAMES, StoredTensor, copies_of_shared, further_layers, output_name, sources

_FLOATS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # safetensors' name -> Terrace's
_NAMED = 3  # number of tensors of a kind that an error lists


class Pretrained:
    """The weights in a folder, opened for reading.

    `config` is the model to read them for, by default that of the folder's config.json. With `adds_rows` it may have a
    larger vocabulary than the folder; new rows are the mean of the existing ones. Raises `ModelError` for a folder
    without readable weights.
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None, *, adds_rows: bool = False) -> None:
        self.folder = Path(folder)
        self._config = config
        self._adds_rows = adds_rows
        self._open: dict[str, Any] = {}
        self._sums = Checksums(self.folder)
        self._dcp = DcpWeights(self.folder, lambda: self.config) if is_dcp(self.folder) else None
        if self._dcp is not None:
            self._open[METADATA] = self._dcp
            self._files = dict.fromkeys(self._dcp.keys(), METADATA)
            return
        index = weight_files(self.folder)
        # Small models have one file and no index.
        stored = index if index is not None else dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        packed = PackedWeights(stored, self._file)
        self._open |= {PACKED: packed} if packed.names else {}
        self._files = packed.with_own()

    @cached_property
    def config(self) -> ModelConfig:
        """The model. Raises `ModelError` if config.json is missing or has something that is not implemented."""
        return load_model(str(self.folder)) if self._config is None else self._config

    @property
    def lacks_score(self) -> bool:
        """Whether the model has a scalar head but the folder does not, so that the head must be initialised."""
        return self.config.scalar_head and SCORE not in self._files

    @property
    def dtype(self) -> str:
        """Stored dtype of the embedding: fp32, bf16, fp16 or fp64."""
        return _FLOATS[self._header(self._stored_name(self._sources["embedding", "weight"].name))[1]]

    def __contains__(self, parameter: tuple[str, str]) -> bool:
        """False only for a scalar head that the folder lacks; `check` reports other missing parameters."""
        return not (self.lacks_score and parameter == ("head", SCORE))

    def value(self, block_name: str, param_name: str, parts: Sequence[int] | None = None) -> Tensor:
        """Read a whole parameter, or only `parts` of a stack, in Terrace's layout and its stored dtype, to the CPU.

        Raises `ModelError` if it is missing or cannot be read.
        """
        source = self._sources[block_name, param_name]
        if source.is_stack:  # one part at a time: a rank may hold few of them
            numbers = range(source.shape[0]) if parts is None else parts
            return torch.stack([self._part(source, source.name, index) for index in numbers])
        if not source.num_stacked:
            return self._part(source, source.name)
        names = source.tensors
        chosen = names if parts is None else [names[index] for index in parts]
        return torch.stack([self._part(source, name) for name in chosen])

    def _part(self, source: StoredTensor, wanted: str, index: int | None = None) -> Tensor:
        name = self._stored_name(wanted)
        if name not in self._files:
            raise ModelError(f"{self.folder} has no tensor {wanted}")
        try:
            self._sums.check(self._file(self._files[name]), self._files[name], name)
            stored = self._file(self._files[name]).get_slice(name)
            tensor = _taken(stored if index is None else stored[index : index + 1][0], source)
            return self._with_new_rows(tensor) if source.name in self._of_tokens else tensor
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"cannot read {name} of {self.folder / self._files[name]}: {error}") from error

    @cached_property
    def num_new_rows(self) -> int:
        """Number of vocabulary rows to add to those of the folder; 0 without `adds_rows`."""
        if not self._adds_rows or self._dcp is not None or not (self.folder / CONFIG).is_file():
            return 0
        return max(0, self.config.vocab_size - load_model(str(self.folder), training=False).vocab_size)

    @cached_property
    def _of_tokens(self) -> tuple[str, ...]:
        # Tensors with a row per token.
        return (self._sources["embedding", "weight"].name, output_name(self.config)) if self.num_new_rows else ()

    def _with_new_rows(self, tensor: Tensor) -> Tensor:
        mean = tensor.mean(0, keepdim=True, dtype=torch.float64).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(self.num_new_rows, -1)])

    def check(self, config: ModelConfig | None = None) -> None:
        """Compare names, shapes and dtypes with the model, by default that of this object.

        Raises `ModelError` that lists missing and unexpected tensors, and tensors with another shape or a dtype that is
        not a plain float. Warns of other files of the export that have changed.
        """
        if config is not None and config != self._config:
            Pretrained(self.folder, config, adds_rows=self._adds_rows).check()
            return
        if self._dcp is not None:
            self._dcp.check(self.config)
        wanted = {name: source.shape for source in self._sources.values() for name in source.tensors}
        for name in self._of_tokens:
            if name in wanted:
                wanted[name] = (wanted[name][0] - self.num_new_rows, *wanted[name][1:])
        if self.lacks_score:
            del wanted[SCORE]
        names = {self._stored_name(name): name for name in wanted}
        missing = [name for stored, name in names.items() if stored not in self._files]
        output = output_name(self.config)
        # With a scalar head the output matrix is not needed.
        is_spare = self.config.tied_embeddings or self.lacks_score
        tied = output if is_spare and output in self._files else None
        # Derived buffers (rotary frequencies, masks) and a tied output matrix may be stored or not.
        unexpected = [name for name in self._files if name not in names and name != tied and not self._is_spare(name)]
        complaints = [*_listed("lacks", missing), *_listed("has beside the model's", unexpected)]
        headers = {name: self._header(name) for name in names if name in self._files}
        for name, (shape, dtype) in headers.items():
            if shape != wanted[names[name]]:
                complaints.append(f"{name} is {list(shape)} there and {list(wanted[names[name]])} in the model")
            elif dtype not in _FLOATS:
                complaints.append(f"{name} is stored as {dtype}, and only {', '.join(_FLOATS)} are read")
        if complaints:
            more = f"; and {len(complaints) - _NAMED} more" if len(complaints) > _NAMED else ""
            fix = misfit_words(missing, unexpected) or "give --model the folder of the weights"
            if missing == [output_name(self.config)]:
                fix = "give --model.tie_word_embeddings true where the embedding is the output matrix"
            if missing and all(name.startswith(further_layers(self.config, MOST_FURTHER_TOKENS)) for name in missing):
                fix = f"give --model.{NEXTN} 0 where the folder has no layers that predict further tokens"
            raise ModelError(f"{self.folder} does not fit the model: {'; '.join(complaints[:_NAMED])}{more}: {fix}")
        for file in sorted(set(self._files.values())):
            self._sums.check_others(self._file(file))
        # A folder may contain an output matrix that differs from the embedding; tying them would lose it.
        if tied is None or self.config.scalar_head:
            return
        stored = self._file(self._files[tied]).get_tensor(tied)
        if not torch.equal(stored, self.value("embedding", "weight")[: len(stored)]):
            raise ModelError(
                f"{self.folder} has an output matrix {tied} that differs from the embedding, to which the model ties "
                "it: give --model.tie_word_embeddings false"
            )

    def _is_spare(self, name: str) -> bool:
        if DERIVED.search(name) or name.startswith(NAMES[self.config.family].beyond):
            return True
        # Layers that predict further tokens may be left out of the model.
        if FAMILIES[self.config.family].names.get("num_mtp_layers") != NEXTN:
            return False
        if self.config.num_mtp_layers:
            return name in copies_of_shared(self.config)
        layers = further_layers(self.config, MOST_FURTHER_TOKENS)
        return name.startswith(layers) and f"{layers[0]}{PROJECTION}.weight" in self._files

    @cached_property
    def _sources(self) -> dict[tuple[str, str], StoredTensor]:
        return sources(self.config)

    def _stored_name(self, name: str) -> str:
        # Folders of a bare model (without head) omit the base prefix.
        names = NAMES[self.config.family]
        found = (name, name.removeprefix(names.base), name.replace(*names.resaved, 1))
        return next((each for each in found if each in self._files), name)

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        try:
            tensor = self._file(self._files[name]).get_slice(name)
        except safetensors.SafetensorError as error:
            raise ModelError(f"{self.folder / self._files[name]} has no tensor {name}: download it again") from error
        return tuple(tensor.get_shape()), str(tensor.get_dtype())

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                check_file(self.folder / name, self.folder)
                self._open[name] = safetensors.safe_open(self.folder / name, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ModelError(f"cannot read {self.folder / name} ({error}): download it again") from error
        return self._open[name]


def _listed(what: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"it {what} {', '.join(names[:_NAMED])}{more}"


def _taken(stored: Any, source: StoredTensor) -> Tensor:
    if source.parts and source.num_groups == 1:
        # The rows of a part are contiguous, so only these are read.
        begin = sum(source.parts[: source.part])
        part = slice(begin, begin + source.parts[source.part])
        tensor: Tensor = stored[:, part] if source.transposed else stored[part]
        return tensor.t() if source.transposed else tensor
    tensor = stored[:] if source.shape else stored[...]
    tensor = tensor.t() if source.transposed else tensor
    tensor = tensor.flatten() if source.is_flat else tensor
    if not source.parts:
        return tensor
    grouped = tensor.reshape(source.num_groups, -1, *tensor.shape[1:])  # (G, rows of all parts, ...)
    first, rows = source.place_in_group
    return grouped[:, first : first + rows].flatten(0, 1)
