"""What is agreed of a problem or a format is said in full by ``mla-verify list``."""

import pytest

from mla_ref.formats import formats
from mla_ref.problem import problems
from oracles.command import main
from oracles.tables import contract
from oracles.verify import find_backend


@pytest.mark.parametrize("name", problems())
def test_every_field_of_a_problem_is_explained(name):
    said = contract(name)
    for field in (*problems()[name].inputs._fields, *problems()[name].output._fields):
        assert f"{field}:" in said or f"{field}," in said, f"{name} says nothing of {field}"


@pytest.mark.parametrize("name", formats())
def test_every_byte_of_a_format_is_explained(name):
    said = contract(name)
    assert said.splitlines()[2].startswith("offset")
    assert "rope" in said


def test_list_of_a_name_prints_its_contract(capsys):
    assert main(["list", "fp8_ds_mla"]) == 0
    assert "c        c/32     fp32   one scale for 128 channels" in capsys.readouterr().out


def test_a_module_without_the_usual_name_tells_the_names_that_it_has(tmp_path, monkeypatch):
    (tmp_path / "their_parts.py").write_text(
        "from mla_ref.latent import BACKEND as DECODE\nfrom mla_ref.naive import BACKEND as PREFILL\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"has no BACKEND, but their_parts:DECODE, their_parts:PREFILL$"):
        find_backend("their_parts")
