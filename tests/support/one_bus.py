"""FSMoE's order of a mixture in chunks on one bus, simulated by other code than the clocks of a rank."""

from bench.validation.fsmoe_layers import Chunk


def on_one_bus_s(chunk: Chunk, degree: int, gradient_s: float = 0.0, *, slowing: float = 2.0) -> float:
    """Seconds of a mixture in `degree` chunks while a message inside a node and one between nodes share a bus.

    Each takes `slowing` times as long while the other is under way.
    """
    # (Seconds, lane and number of the piece that it follows) of each lane's pieces in order.
    between, inside, compute = range(3)
    lanes: list[list[tuple[float, int, int]]] = [
        [(chunk.dispatch_s, between, 0)] * degree
        + [(gradient_s, between, 0)]
        + [(chunk.combine_s, inside, degree + each + 1) for each in range(degree)],
        [(chunk.gather_s, between, each + 1) for each in range(degree)]
        + [(chunk.reduce_s, compute, each + 1) for each in range(degree)],
        [(chunk.products_s, inside, each + 1) for each in range(degree)],
    ]
    done, now_s = [0, 0, 0], 0.0
    left_s = [pieces[0][0] for pieces in lanes]
    while True:
        running = [
            lane
            for lane, pieces in enumerate(lanes)
            if done[lane] < len(pieces) and done[pieces[done[lane]][1]] >= pieces[done[lane]][2]
        ]
        if not running:
            return now_s
        slow = slowing if between in running and inside in running else 1.0
        rates = [1.0 if lane == compute else 1 / slow for lane in running]
        step_s = min(left_s[lane] / rate for lane, rate in zip(running, rates, strict=True))
        now_s += step_s
        for lane, rate in zip(running, rates, strict=True):
            if left_s[lane] / rate <= step_s:
                done[lane] += 1
                left_s[lane] = lanes[lane][done[lane]][0] if done[lane] < len(lanes[lane]) else 0.0
            else:
                left_s[lane] -= rate * step_s
