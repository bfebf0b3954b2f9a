"""Seconds and bytes of the blocks of a shape: least and most over its context forms, if it is open."""

from collections.abc import Sequence

from terrace.plan.mesh import Mesh
from terrace.planner.estimate import Estimator
from terrace.planner.parts import Work
from terrace.planner.pipelines import block_work
from terrace.planner.space import OpenMesh, Space, closed


class Works:
    """Seconds and bytes of the blocks of one task, by shape; each is found once."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.specs = estimator, estimator.specs
        self._space = Space(task=estimator.task)
        self._known_forms: dict[Mesh, Sequence[Mesh]] = {}
        self._block_works: dict[tuple[Mesh, bool, int, int, bool, bool], list[Work]] = {}
        self._most_layer: dict[tuple[Mesh, int, int, bool], list[Work]] = {}

    def of(self, shape: OpenMesh, micro_batch: int, recompute: int, context: bool = True) -> list[Work]:
        """Least seconds of each kind of block; without `context`, less the messages of context ranks."""
        accumulate = self.estimator.accumulates(shape.mesh, micro_batch)
        key = (shape.mesh.inside, shape.is_open, micro_batch, recompute, accumulate, context)
        found = self._block_works.get(key)
        if found is None:
            forms, numbers = self.forms(shape), (micro_batch, recompute, accumulate)
            kinds = range(len(self.specs))
            found = [block_work(self.estimator, kind, forms, *numbers, context=context) for kind in kinds]
            self._block_works[key] = found
        return found

    def most(self, shape: OpenMesh, micro_batch: int, recompute: int) -> list[Work]:
        """Most seconds of each kind of block: all that may hide messages."""
        works = self.of(shape, micro_batch, recompute)
        if not shape.is_open:
            return works
        accumulate = self.estimator.accumulates(shape.mesh, micro_batch)
        key = (shape.mesh.inside, micro_batch, recompute, accumulate)
        found = self._most_layer.get(key)
        if found is None:
            found = list(works)
            for kind, spec in enumerate(self.specs):
                # Only attention depends on the form.
                if spec.attends:
                    each = [
                        block_work(self.estimator, kind, (form,), micro_batch, recompute, accumulate)
                        for form in self.forms(shape)
                    ]
                    # Maxima may come from different forms; a bound does not need one form that attains them all.
                    forward_s, backward_s, weight_s = map(max, zip(*each, strict=True))
                    found[kind] = (forward_s, backward_s, weight_s)
            self._most_layer[key] = found
        return found

    def kept(self, shape: OpenMesh, micro_batch: int, recompute: int) -> list[int]:
        """Least bytes that a block of each kind keeps per micro-batch."""
        # Ulysses beyond the number of key-value heads replicates them, so the form with fewest Ulysses ranks keeps
        # least. Logits exist only while they are computed.
        numbers = self.forms(shape)[0], micro_batch, recompute
        kept = self.estimator.kept_bytes
        return [0 if spec.at_an_end else kept(kind, *numbers) for kind, spec in enumerate(self.specs)]

    def forms(self, shape: OpenMesh) -> Sequence[Mesh]:
        """The context forms of a shape, by ascending Ulysses degree."""
        if not shape.is_open:
            return (shape.mesh.inside,)
        found = self._known_forms.get(shape.mesh.inside)
        if found is None:
            found = self._known_forms[shape.mesh.inside] = [form.inside for form in closed(self._space, shape.mesh)]
        return found
