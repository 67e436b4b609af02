"""The launcher's variables: what they say, and one sentence about each that makes no sense."""

import pytest

from megatron.training.launcher import Launch, is_alone, is_first, read_launch

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TWO = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_process_without_a_launcher_is_alone() -> None:
    assert read_launch() == Launch(1, 0, 1, 0, joins=False)
    assert is_alone() and is_first()


def test_a_process_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TWO | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert read_launch() == Launch(2, 1, 2, 1, joins=True)
    assert not is_alone() and not is_first()


ADDRESS_ONLY = {"RANK": "0", "MASTER_ADDR": "here"}

# Variables beside none or those of a process of two, and the beginning of the sentence.
WITHOUT_SENSE = [
    ({}, {"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc' in the environment, which is no whole number of at least 1"),
    ({}, {"WORLD_SIZE": ""}, "WORLD_SIZE is '' in the environment"),
    ({}, {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment"),
    ({}, {"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1' in the environment"),
    ({}, {"WORLD_SIZE": "\u00b2"}, "WORLD_SIZE is '\u00b2' in the environment"),
    ({}, {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK and MASTER_ADDR are not set"),
    ({}, {"WORLD_SIZE": "1", "RANK": "1"}, "RANK is 1 in the environment, but the 1 processes"),
    ({}, {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0' in the environment, which is no whole number"),
    ({}, {"LOCAL_WORLD_SIZE": "abc"}, "LOCAL_WORLD_SIZE is 'abc' in the environment"),
    ({}, {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' in the environment, which is no whole number of at least 0"),
    (ADDRESS_ONLY, {"WORLD_SIZE": "1"}, "RANK and MASTER_ADDR are set in the environment, but MASTER_PORT is not"),
    (ADDRESS_ONLY, {"MASTER_PORT": "29500"}, "RANK and MASTER_ADDR are set in the environment, but WORLD_SIZE is not"),
    (TWO, {"RANK": "x"}, "RANK is 'x' in the environment"),
    (TWO, {"RANK": "2"}, "RANK is 2 in the environment, but the 2 processes that WORLD_SIZE counts have ranks 0 to 1"),
    (TWO, {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc' in the environment"),
    (TWO, {"MASTER_PORT": "0"}, "MASTER_PORT is 0 in the environment, but ports are 1 to 65535"),
    (TWO, {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536 in the environment, but ports are 1 to 65535"),
]


@pytest.mark.parametrize(("given", "wrong", "beginning"), WITHOUT_SENSE)
def test_a_variable_that_makes_no_sense_is_refused(
    given: dict[str, str], wrong: dict[str, str], beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, given | wrong)
    with pytest.raises(ValueError) as refusal:
        read_launch()
    sentence = str(refusal.value)
    assert sentence.startswith(beginning) and sentence.endswith(".") and sentence.count(": ") == 1
    is_alone(), is_first()  # what reports an error asks without another one
