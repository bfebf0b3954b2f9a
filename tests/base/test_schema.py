"""Strict tables: what is loaded, what is refused, and what an override may reach."""

import copy
import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ConfigError
from terrace.base.schema import dump, load, merge, parse_override, read_table
from terrace.cluster.cluster import Cluster, Kernels
from terrace.cluster.presets import cluster_table, load_cluster, preset_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """A table inside a table."""

    name: str
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """One field of every kind the strict loader knows."""

    flag: bool = False
    count: int = 0
    ratio: float = 0.0
    word: str = ""
    mode: Literal["fast", "slow", 1] = "fast"
    limit: int | None = None
    either: int | str = 0
    pair: tuple[int, str] = (0, "")
    items: tuple[Inner, ...] = ()
    inner: Inner = Inner(name="default")
    by_name: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Inner] = dataclasses.field(default_factory=dict)


words = st.text("abcxyz_", min_size=1, max_size=4)
scalars = st.integers(-9, 9) | st.booleans() | words
tables = st.recursive(
    st.dictionaries(words, scalars, max_size=3),
    lambda inner: st.dictionaries(words, inner | scalars, max_size=3),
)
inners = st.builds(Inner, name=words, size=st.integers())
outers = st.builds(
    Outer,
    flag=st.booleans(),
    count=st.integers(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    word=words,
    mode=st.sampled_from(["fast", "slow", 1]),
    limit=st.none() | st.integers(),
    either=st.integers() | words,
    pair=st.tuples(st.integers(), words),
    items=st.lists(inners, max_size=3).map(tuple),
    inner=inners,
    by_name=st.dictionaries(words, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    tables=st.dictionaries(words, inners, max_size=3),
)


def _refused(message: str) -> Any:
    return pytest.raises(ConfigError, match=re.escape(message))


# Round trips


@settings(deadline=None)
@given(outers)
def test_dump_then_load_is_the_identity(outer: Outer) -> None:
    table = dump(outer)
    assert load(Outer, table, "outer") == outer
    assert load(Outer, json.loads(json.dumps(table)), "outer") == outer


@pytest.mark.parametrize("name", preset_names())
def test_presets_round_trip(name: str) -> None:
    table = cluster_table(name)
    cluster = load(Cluster, table, "cluster")
    dumped = dump(cluster)
    kernels = dump(Kernels()) | table["device"].get("kernels", {})
    ideal_device = {
        "backend": "cuda",
        "headroom": "5%",
        "overlap_penalty": 0.0,
        "power_watts": 0.0,
        "spread": 0.0,
        "marks": {},
    }
    below = {key: {"shared_by": "", "marks": {}, **medium} for key, medium in table["device"].get("below", {}).items()}
    device = {**ideal_device, **table["device"], "kernels": kernels} | ({"below": below} if below else {})
    ideal = {
        "shared": False,
        "shared_by": "",
        "direct": False,
        "efficiency": 1.0,
        "half_bytes": 0.0,
        "links": [],
        "contention": [],
        "marks": {},
        "bus": {},
    }
    assert dumped == {**table, "device": device, "tiers": [ideal | tier for tier in table["tiers"]]}
    assert dump(load(Cluster, dumped, "cluster")) == dumped
    assert load(Cluster, tomllib.loads(tomli_w.dumps(dumped)), "cluster") == cluster


def test_none_is_left_out() -> None:
    assert "limit" not in dump(Outer())
    assert dump({"a": None, "b": (1, 2)}) == {"b": [1, 2]}
    assert load(Outer, {"limit": None}, "outer").limit is None


# What is converted and what is refused


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cuont": 1}, "unknown key outer.cuont; did you mean 'outer.count'?"),
        ({"inner": {"name": "x", "sise": 1}}, "unknown key outer.inner.sise; did you mean 'outer.inner.size'?"),
        (
            {"items": [{"name": "x"}, {"nam": "y"}]},
            "unknown key outer.items[1].nam; did you mean 'outer.items[1].name'?",
        ),
        ({"tables": {"x": {"zzz": 1}}}, "unknown key outer.tables.x.zzz; known: name, size"),
        ({"inner": {}}, "outer.inner.name is missing"),
        ({"ratio": "1.5"}, "outer.ratio = '1.5' must be of type float"),
        ({"ratio": True}, "outer.ratio = True must be of type float"),
        ({"ratio": 10**400}, "outer.ratio is too large"),
        ({"count": True}, "outer.count = True must be of type int"),
        ({"count": 1.0}, "outer.count = 1.0 must be of type int"),
        ({"count": None}, "outer.count = None must be of type int"),
        ({"flag": 1}, "outer.flag = 1 must be of type bool"),
        ({"word": 1}, "outer.word = 1 must be of type str"),
        ({"mode": "fats"}, "outer.mode = 'fats' is not one of its values; did you mean 'fast'?"),
        ({"mode": True}, "outer.mode = True is not one of its values"),
        ({"mode": 1.0}, "outer.mode = 1.0 is not one of its values"),
        ({"mode": ["fast"]}, "outer.mode = ['fast'] is not one of its values"),
        ({"limit": "1"}, "outer.limit = '1' must be of type int"),
        ({"limit": False}, "outer.limit = False must be of type int"),
        ({"either": 1.5}, "outer.either = 1.5 must be of type str"),
        ({"either": None}, "outer.either = None must be of type str"),
        ({"pair": [1]}, "outer.pair = [1] must be a list of 2, not of 1"),
        ({"pair": ["x", 1]}, "outer.pair[0] = 'x' must be of type int"),
        ({"items": {"name": "x"}}, "outer.items = {'name': 'x'} must be a list"),
        ({"items": "xy"}, "outer.items = 'xy' must be a list"),
        ({"items": [1]}, "outer.items[0] must be a table, not 1"),
        ({"inner": [1]}, "outer.inner must be a table, not [1]"),
        ({"by_name": [1.0]}, "outer.by_name = [1.0] must be a table"),
        ({"by_name": {"x": "1"}}, "outer.by_name.x = '1' must be of type float"),
    ],
)
def test_refused_with_the_dotted_path(table: dict[str, Any], message: str) -> None:
    with _refused(message):
        load(Outer, table, "outer")


@settings(deadline=None)
@given(st.integers(-(2**53), 2**53))
def test_an_integer_is_a_float(value: int) -> None:
    ratio = load(Outer, {"ratio": value, "by_name": {"x": value}}, "outer").ratio
    assert type(ratio) is float
    assert ratio == value


def test_values_that_are_accepted() -> None:
    outer = load(Outer, {"mode": 1, "limit": 3, "either": "x", "pair": [1, "x"], "items": []}, "outer")
    assert (outer.mode, outer.limit, outer.either, outer.pair, outer.items) == (1, 3, "x", (1, "x"), ())


# Merging


@settings(deadline=None)
@given(tables, tables)
def test_merge_changes_neither_input(base: dict[str, Any], top: dict[str, Any]) -> None:
    before = copy.deepcopy((base, top))
    merge(base, top)
    assert (base, top) == before


@settings(deadline=None)
@given(tables, tables)
def test_merge_laws(base: dict[str, Any], top: dict[str, Any]) -> None:
    assert merge(base, {}) == base
    assert merge({}, top) == top
    assert merge(base, base) == base
    merged = merge(base, top)
    assert merge(merged, top) == merged
    assert merged.keys() == base.keys() | top.keys()


def test_override_reaches_a_tier_by_name() -> None:
    table = cluster_table("frontier")
    before = copy.deepcopy(table)
    merged = merge(table, parse_override("tiers.node.size", "3"))
    assert table == before
    cluster, old = load(Cluster, merged, "cluster"), load_cluster("frontier")
    assert [tier.size for tier in cluster.tiers] == [2, 3, 2]
    assert [tier.name for tier in cluster.tiers] == [tier.name for tier in old.tiers]
    assert (cluster.tiers[0], cluster.tiers[2]) == (old.tiers[0], old.tiers[2])


def test_override_adds_to_a_mapping() -> None:
    merged = merge(cluster_table("local"), parse_override("device.peak_flops_per_s.fp16", "7"))
    peaks = load(Cluster, merged, "cluster").device.peak_flops_per_s
    assert peaks == {**load_cluster("local").device.peak_flops_per_s, "fp16": 7.0}


@pytest.mark.parametrize(
    ("dotted", "text", "message"),
    [
        ("tiers.nod.size", "4", "unknown name 'nod' in tiers; did you mean 'node'?"),
        ("tiers.node", "4", "tiers.node must be a table, not 4"),
        ("tiers.node.sise", "4", "unknown key cluster.tiers[1].sise; did you mean 'cluster.tiers[1].size'?"),
        ("tiers.node.size", "four", "cluster.tiers[1].size = 'four' must be of type int"),
        ("device", "4", "cluster.device must be a table, not 4"),
        ("name.x", "4", "cluster.name = {'x': 4} must be of type str"),
    ],
)
def test_override_that_cannot_apply(dotted: str, text: str, message: str) -> None:
    with _refused(message):
        load(Cluster, merge(cluster_table("frontier"), parse_override(dotted, text)), "cluster")


def test_a_list_without_names_takes_no_name() -> None:
    with _refused("unknown name 'x' in sizes"):
        merge({"sizes": [1, 2]}, {"sizes": {"x": 1}})
    assert merge({"sizes": [1, 2]}, {"sizes": [3]}) == {"sizes": [3]}


# Overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("int8", "int8"),
        ("a bare phrase", "a bare phrase"),
        ("", ""),
        ("4", 4),
        ("-4", -4),
        ("1e9", 1e9),
        ("1_000", 1000),
        ("true", True),
        ("True", "True"),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ("[1, 2", "[1, 2"),
        ("{ x = 1 }", {"x": 1}),
        ('"4"', "4"),
        ("'4'", "4"),
        ('"', '"'),
        ("1\nother = 2", "1\nother = 2"),
        ("1\n[value2]", "1\n[value2]"),
        ("9" * 5000, "9" * 5000),
        ("[" * 100_000, "[" * 100_000),
        ("runs/a.toml", "runs/a.toml"),
    ],
)
def test_parse_override_value(text: str, value: object) -> None:
    parsed = parse_override("a.b.c", text)
    assert parsed == {"a": {"b": {"c": value}}}
    assert type(parsed["a"]["b"]["c"]) is type(value)


@settings(deadline=None)
@given(st.text())
def test_parse_override_never_fails_on_a_value(text: str) -> None:
    assert parse_override("key", text).keys() == {"key"}


@pytest.mark.parametrize("dotted", ["", ".", "a.", ".a", "a..b"])
def test_parse_override_empty_key(dotted: str) -> None:
    with _refused("has an empty key"):
        parse_override(dotted, "1")


# Files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", b"[1]", "must hold a table of keys, not a list"),
        ("t.json", b"{", "is not valid JSON"),
        ("t.json", b"[" * 100_000, "is not valid JSON"),
        ("t.toml", b"a = 1\na = 2", "is not valid TOML"),
        ("t.toml", b"a = " + b"9" * 5000, "is not valid TOML"),
        ("t.toml", b"\xff", "it is not UTF-8 text"),
    ],
)
def test_file_that_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with _refused(message):
        read_table(tmp_path / name)


def test_files_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "t.toml").write_text("a = 1", encoding="utf-8")
    assert read_table(tmp_path / "t.json") == read_table(tmp_path / "t.toml") == {"a": 1}
    with _refused("No such file"):
        read_table(tmp_path / "missing.toml")


def test_a_toml_file_without_end_is_refused_after_its_first_megabytes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"run\.toml: it has more than 16 MB, which no such file needs"):
        read_table(tmp_path / "run.toml")
