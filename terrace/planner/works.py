"""Seconds and bytes of the blocks of a shape: minima and maxima over its context forms, if it is open."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrace.plan.mesh import Mesh
from terrace.plan.recompute import WHOLE
from terrace.planner.candidate import Sizes
from terrace.planner.parts import BlockWorks, Runs, Work, work_of_runs
from terrace.planner.pipelines import block_work
from terrace.planner.space import OpenMesh, Space, context_forms, least_of

if TYPE_CHECKING:
    from terrace.planner.estimate import Estimator


class Works:
    """Seconds and bytes of the blocks of one task, cached by shape."""

    def __init__(self, estimator: "Estimator") -> None:
        self.estimator, self.specs, self.split = estimator, estimator.specs, estimator.split
        (self.whole,) = self.split.whole().chunks
        self.again = estimator.task.recomputations
        self._space = Space(task=estimator.task)
        self._known_forms: dict[Mesh, Sequence[Mesh]] = {}
        self._sizes: dict[tuple[OpenMesh, int], Sizes] = {}
        self._block_works: dict[tuple[object, ...], BlockWorks] = {}
        self._most_layer: dict[tuple[Mesh, int, int, bool, bool], list[Work]] = {}

    def of(
        self,
        shape: OpenMesh,
        micro_batch: int,
        recompute: int,
        accumulate: bool,
        context: bool = True,
        exact: bool = True,
        halves: bool = False,
    ) -> BlockWorks:
        """Minimum seconds of the blocks; `context`, `exact` and `halves` as in `Estimator.least_block`.

        `accumulate`: a step accumulates the gradients of several micro-batches.
        """
        recompute = self.again.all_layers(recompute, least=True)
        numbers, how = (micro_batch, recompute, accumulate), (context, exact, halves)
        key = (shape.mesh.inside, shape.is_open, shape.divides, *numbers, *how)
        found = self._block_works.get(key)
        if found is None:
            if context and shape.is_open and self.estimator.computes_by_tokens:
                each = self._with_messages(shape, *numbers)
            else:
                forms, kinds = self.forms(shape), range(len(self.specs))
                each = [
                    block_work(self.estimator, kind, forms, *numbers, context=context, exact=exact, halves=halves)
                    for kind in kinds
                ]
                if shape.divides:
                    each = self._with_least_stacks(each, forms[0], *numbers)
            layers = 0.0 if self.split.alike is None else self.split.logits_in_layers(each)
            found = self._block_works[key] = BlockWorks(each, sum(work_of_runs(each, self.whole)[:2]), layers)
        return found

    def _with_messages(self, shape: OpenMesh, micro_batch: int, recompute: int, accumulate: bool) -> list[Work]:
        least, fewer = least_of(self._space, shape, micro_batch)
        found = list(self.of(least, fewer, recompute, accumulate, context=False).each)
        for kind, spec in enumerate(self.specs):
            if spec.attends:
                # Overlap saves at most the compute it hides behind, so the minimum compute plus the minimum messages,
                # even of different forms, is a bound.
                forward_s, backward_s, recompute_s = self.estimator.least_waits(kind, self.forms(shape), micro_batch)
                own = found[kind]
                backward_s += recompute_s if self.again.values[recompute].parts == WHOLE else 0.0
                found[kind] = own[0] + forward_s, own[1] + backward_s, own[2]
        return found

    def _with_least_stacks(
        self, each: Sequence[Work], form: Mesh, micro_batch: int, recompute: int, accumulate: bool
    ) -> list[Work]:
        # Minimum compute over all divisions, without their messages.
        found, work = list(each), self.estimator.work(form, micro_batch)
        for kind, spec in enumerate(self.specs):
            if spec.has_stacks:
                own = found[kind]
                forward_s, input_s, weight_s = self.estimator.experts.least_longer(kind, work, accumulate)
                backward_s = input_s + weight_s
                backward_s += forward_s if self.again.values[recompute].parts == WHOLE else 0.0
                # A backward that waits for routed messages hides tensor messages meanwhile.
                hidden_s = self.estimator.tensor_waits(kind, form, micro_batch, accumulate)[1]
                found[kind] = own[0] + forward_s, own[1] + backward_s, own[2] + weight_s + hidden_s
        return found

    def sizes(self, shape: OpenMesh, recompute: int) -> Sizes:
        """Sizes that do not depend on the micro-batch."""
        recompute = self.again.all_layers(recompute, least=False)
        found = self._sizes.get((shape, recompute))
        if found is None:
            mesh, alike = shape.mesh, self.split.alike
            numels = self.estimator.numels.least(mesh) if shape.divides else self.estimator.numels.own(mesh)
            # While the division of stacks is open, their states are unknown.
            stacks = (0,) * len(numels) if shape.divides else self.estimator.numels.stacks(mesh)
            kept = self._kept(shape, recompute)
            found = self._sizes[shape, recompute] = Sizes(
                num_stages=mesh.total("pipeline"),
                data=mesh.total("data"),
                numels=numels,
                all_numel=_sum(numels, self.whole),
                stacks=stacks,
                all_stacks=_sum(stacks, self.whole),
                # Sharded parameters need at least one gathered block.
                gathered_bytes=(min(numels) if alike is None else numels[alike]) * self.estimator.item,
                kept=kept,
                all_kept=_sum(kept, self.whole),
            )
        return found

    def most(
        self, shape: OpenMesh, micro_batch: int, recompute: int, accumulate: bool, *, halves: bool = False
    ) -> list[Work]:
        """Maximum seconds of each kind of block, which bound the messages that it can hide."""
        recompute = self.again.all_layers(recompute, least=False)
        if not shape.is_open:
            return self.of(shape, micro_batch, recompute, accumulate, halves=halves).each
        works = self.of(shape, micro_batch, recompute, accumulate).each
        key = (shape.mesh.inside, micro_batch, recompute, accumulate, halves)
        found = self._most_layer.get(key)
        if found is None:
            found = list(works)
            for kind, spec in enumerate(self.specs):
                # Only attention depends on the form.
                if spec.attends:
                    each = [
                        block_work(self.estimator, kind, (form,), micro_batch, recompute, accumulate, halves=halves)
                        for form in self.forms(shape)
                    ]
                    # Maxima may come from different forms; a bound does not need one form that attains them all.
                    forward_s, backward_s, weight_s = map(max, zip(*each, strict=True))
                    found[kind] = (forward_s, backward_s, weight_s)
            self._most_layer[key] = found
        return found

    def _kept(self, shape: OpenMesh, recompute: int) -> list[int]:
        # Ulysses beyond the number of key-value heads replicates them, so the form with fewest Ulysses ranks keeps
        # least. Logits exist only while they are computed.
        numbers = self.forms(shape)[0], 1, recompute
        kept = self.estimator.kept_bytes
        return [0 if spec.at_an_end else kept(kind, *numbers) for kind, spec in enumerate(self.specs)]

    def forms(self, shape: OpenMesh) -> Sequence[Mesh]:
        """The context forms of a shape, by ascending Ulysses degree."""
        if not shape.is_open:
            return (shape.mesh.inside,)
        found = self._known_forms.get(shape.mesh.inside)
        if found is None:
            found = self._known_forms[shape.mesh.inside] = [form.inside for form in context_forms(self._space, shape)]
        return found


def _sum(each: Sequence[int], runs: Runs) -> int:
    return sum(count * each[kind] for kind, count in runs)
