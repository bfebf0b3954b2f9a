"""Calls of roles in one process: shares, handles that go on to other roles, refusals."""

import pytest

from terrace.base.errors import ConfigError, DataError
from terrace.rl.calls.call import call
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.values.rows import Rows
from tests.support.toy_roles import Paired, Scaler, prompts_of


def test_rows_stay_where_they_are_until_they_are_asked_for() -> None:
    with InlineRuntime() as runtime:
        roles = runtime.pool(1).host(actor=(Scaler, {}), reward=(Scaler, {"factor": 2.0}))
        rows = prompts_of(2, 1, 3)
        responses = roles["actor"].generate.remote(rows, longer=2)
        assert len(responses) == 3
        assert responses.tokens == [4, 2, 6]
        scores = roles["reward"].score.remote(rows, responses)
        assert scores.get().tensor("scores").tolist() == [0, 2, 12]
        assert scores.get().tensor("scores") is scores.get().tensor("scores"), "no copy in one process"
        assert roles["reward"].update(rows, scores) == {"mean": 14 / 3, "total": 14.0}
        assert roles["reward"].state(plus=1.0) == [(0, 15.0)]
        assert roles["actor"].longest(rows) == 3


def test_what_cannot_be_called_is_refused() -> None:
    with InlineRuntime() as runtime:
        actor = runtime.pool(1).host(actor=(Scaler, {}))["actor"]
        rows = prompts_of(1, 1)
        with pytest.raises(ConfigError, match=r"actor\.score was given 2 and 1 rows: must be equally many"):
            actor.score(rows, prompts_of(1))
        with pytest.raises(ConfigError, match=r"actor\.score splits rows over 'data', and was given none"):
            actor.score()
        with pytest.raises(ConfigError, match=r"actor\.wrong returned dict, and take = 'data' joins Rows"):
            actor.wrong(rows)
        with pytest.raises(ConfigError, match=r"actor\.state returns no rows"):
            actor.score(actor.state.remote())
        with pytest.raises(DataError, match="column 'prompts' is in both"):
            actor.score(rows, rows)
        with pytest.raises(ConfigError, match="two roles are called 'actor'"):
            runtime.pool(1).host(actor=(Scaler, {}))
        with pytest.raises(ConfigError, match="2 ranks inline"):
            runtime.pool(2)
        with pytest.raises(ConfigError, match="must be 1 or more"):
            runtime.pool(0)
        with pytest.raises(ConfigError, match="use a pool of 4"):
            runtime.pool(1).host(critic=(Fours, {}))


def test_a_call_gets_the_columns_that_it_reads() -> None:
    with InlineRuntime() as runtime:
        reader = runtime.pool(1).host(reader=(Reader, {}))["reader"]
        rows = prompts_of(1, 1)
        assert reader.names(rows) == ["prompts"]
        assert reader.names(reader.all_of.remote(rows)) == ["prompts"]


def test_errors_come_as_they_are_with_role_and_method() -> None:
    with InlineRuntime() as runtime:
        actor = runtime.pool(1).host(actor=(Scaler, {}))["actor"]
        with pytest.raises(KeyError) as caught:
            actor.fail(rank=0, how="bug")
        assert caught.value.__notes__ == ["in actor.fail"]


class Reader(Scaler):
    """Says which columns it was given."""

    @call(split="data", take="first", reads=("prompts",))
    def names(self, rows: Rows) -> list[str]:
        return list(rows.columns)

    @call(split="data", take="data")
    def all_of(self, rows: Rows) -> Rows:
        assert list(rows.columns) == ["prompts", "texts"]
        return rows


class Fours(Paired):
    """A plan for four ranks."""

    @staticmethod
    def layout(num_ranks: int, **_: object) -> RoleLayout:
        return Paired.layout(4)
