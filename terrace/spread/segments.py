"""Segments: which places attend to which tokens. What a balancer says, and what a static ring is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Tokens `start` ... `stop` - 1 of a micro-batch, attended to by `places` of the pool.

    One place attends to all of it. G places are a ring of the degrees `shape`, innermost first, whose product is G:
    the segment is cut into 2G chunks of `chunk` tokens, the last ones shorter or empty; the place at index k of
    `places`, which go with the innermost degree fastest, has chunks k and 2G-1-k. In step s = 1 ... G-1 each passes
    the keys that it has on over the outermost degree l such that s is a multiple of shape[0] ... shape[l-1]: so keys
    cross a slow tier as seldom as can be, and all its ranks share that (Gu et al. 2401.09149, section 4, of
    two degrees). `chunk` 0: ceil(length / 2G).
    """

    start: int
    stop: int
    places: tuple[int, ...]
    shape: tuple[int, ...] = (1,)
    chunk: int = 0
