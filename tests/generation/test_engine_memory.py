"""A generation engine keeps nothing of requests that have ended."""

import gc
import tracemalloc
from pathlib import Path

from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.train.trained import load_trained
from tests.support.hf_folder import write_model


def test_hundreds_of_requests_leave_nothing(tmp_path: Path) -> None:
    """Counted after the first hundred, which fill caches of a fixed size."""
    write_model(tmp_path)
    model = load_trained(tmp_path)
    engine = GenerationEngine(model.blocks, model.config, context=32, num_pages=32, page_tokens=4)

    def run(first: int, num: int) -> tuple[int, int]:
        for number in range(first, first + num, 10):
            prompts = [(1 + each % 50, 2, 3 + each % 7) for each in range(number, number + 10)]
            requests = [
                Request(prompt=prompt, num_tokens=4, seed=number + index, sampling=Sampling(seed=number))
                for index, prompt in enumerate(prompts)
            ]
            engine.run(requests)
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(0, 100)
        objects, held_bytes = run(100, 100)
        more_objects, more_bytes = run(200, 400)
    finally:
        tracemalloc.stop()
    # Less than an object, and than 40 bytes, a request.
    assert more_objects - objects < 200
    assert more_bytes - held_bytes < 16_000
