"""Options of `terrace generate`: values that argparse would drop, and options without effect."""

import pytest

from terrace.cli.generate import SAMPLING
from terrace.cli.main import main, parser_of
from terrace.generation.request import Sampling


@pytest.mark.parametrize("option", ["--prompt", "--tokenizer", "--stop"])
def test_a_value_of_two_dashes_is_a_value(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And comes as far as the folder that is not there."""
    assert main(["generate", "nowhere", "--prompt", "a", f"{option}=--"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--temperature 0 --top-p 0.5", "--top-p 0.5 has no effect: --temperature 0 always takes the likeliest token"),
        ("--temperature 0 --top-k 40", "--top-k 40 has no effect: --temperature 0 always takes the likeliest token"),
        ("--top-k 1 --seed 4", "--seed 4 has no effect: --top-k 1 always takes the likeliest token"),
        ("--top-p 1.5", "--top-p 1.5 must be above 0 and at most 1"),
        ("--device meta", "--device meta cannot be used"),
    ],
)
def test_options_are_refused_in_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nowhere", "--prompt", "a", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"terrace: error: {said}")
    assert error.count("\n") == 1


def test_help_names_the_defaults_of_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser_of().parse_args(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in SAMPLING:
        option = f"--{name.replace('_', '-')} "
        said = text.rpartition(option)[2].partition("(default: ")[2]
        assert float(said.replace(",", ")").partition(")")[0]) == getattr(Sampling, name), name
