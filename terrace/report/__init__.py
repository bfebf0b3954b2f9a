"""Output for people: plans and step reports as tables and pages, loss curves as pictures."""

from terrace.report.inside import ASSIGNED, attention_table, inside_table
from terrace.report.plot import loss_svg
from terrace.report.tables import (
    band_words,
    bytes_table,
    comparison_tables,
    memory_table,
    plan_table,
    stage_band_words,
    time_table,
    wire_words,
)

__all__ = [
    "ASSIGNED",
    "attention_table",
    "band_words",
    "bytes_table",
    "comparison_tables",
    "inside_table",
    "loss_svg",
    "memory_table",
    "plan_table",
    "stage_band_words",
    "time_table",
    "wire_words",
]
