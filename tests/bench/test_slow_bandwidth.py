"""The bandwidth that islands need: found by bisection, used as asked, and as the page has it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.bisection import least
from bench.slow.bandwidth import (
    FORMS,
    PAGE,
    SIZES,
    UTILISATION,
    least_bits_per_s,
    section,
    step_of,
    utilisation,
    with_section,
    words,
)
from terrace.simulate.step import predict_step


@given(threshold=st.floats(1e-3, 1e6))
def test_the_least_number_is_found(threshold: float) -> None:
    found = least(lambda number: number >= threshold, 1e-6, 1e9)
    assert threshold <= found <= 1.002 * threshold


def test_what_never_or_always_holds_has_no_least_number_inside() -> None:
    assert math.isinf(least(lambda number: False, 1.0, 2.0))
    assert least(lambda number: True, 1.0, 2.0) == 1.0


def test_a_link_of_the_found_bandwidth_is_used_as_asked() -> None:
    size, form = SIZES[0], FORMS["the same, int4"]
    found = least_bits_per_s(size, form)
    start = predict_step(step_of(size, form))
    assert UTILISATION <= utilisation(size, start, found) < UTILISATION + 0.01
    assert utilisation(size, start, 0.98 * found) < UTILISATION
    assert f"| the same, int4 | {words(found)} |" in PAGE.read_text(encoding="utf-8")


def test_less_is_needed_where_less_is_sent_or_more_is_hidden() -> None:
    size = SIZES[0]
    names = ("synchronous", "`diloco`: every 100", "`diloco`, int4")
    found = [least_bits_per_s(size, FORMS[name]) for name in names]
    assert found == sorted(found, reverse=True)
    # In int4 a change has a quarter of its bytes in bf16.
    assert found[1] / found[2] == pytest.approx(16 / 4.125, rel=0.02)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_table_of_bandwidths_is_up_to_date() -> None:
    """`python -m bench.slow.bandwidth` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_section(page, section()) == page
