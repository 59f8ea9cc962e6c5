"""``mla-verify plan``: the published pair, sizes, devices, JSON, and what it refuses."""

import json
from pathlib import Path

import pytest

from mla_ref.capacity import GIB
from oracles.command import main
from oracles.plan_cli import gpu_bytes, size

PUBLISHED = ["--preset", "deepseek-r1", "--tp", "8", "--block-size", "64", "--budget", "22.058GiB"]


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by title; titles and cells are two blanks apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_the_published_pair_side_by_side(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *PUBLISHED, "--align", "256", "--compare", "--align", "0"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["blocks"] == ["4,739", "5,266"]
    assert table["host blocks"] == ["859 of 4.000 GiB", "954 of 4.000 GiB"]
    assert table["concurrency"] == ["1.85x at 163,840", "2.06x at 163,840"]
    assert table["lost to padding"] == ["2.205 GiB", "0 B"]


def test_each_comparison_changes_the_one_before(capsys: pytest.CaptureFixture[str]):
    words = ["--align", "256", "--compare", "--format", "fp8_e4m3", "--compare", "--align", "0"]
    assert main(["plan", *PUBLISHED, *words]) == 0
    assert rows(capsys.readouterr().out)["blocks"] == ["4,739", "7,899", "10,532"]


def test_parts_that_one_side_has_not(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *PUBLISHED, "--compare", "--prefill", "padded", "--workspace-cap", "131072"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["joined keys"] == ["-", "768.00 MiB"]
    assert table["hidden states"] == ["28.00 MiB", "-"]
    assert table["kv_b output"] == ["512.00 MiB", "1.000 GiB"]


def test_json_is_the_plan_to_the_byte(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *PUBLISHED, "--json", "--compare", "--align", "256"]) == 0
    packed, aligned = json.loads(capsys.readouterr().out)
    assert (packed["plan"]["num_blocks"], aligned["plan"]["num_blocks"]) == (5266, 4739)
    assert (packed["setting"]["align"], aligned["setting"]["align"]) == (1, 256)
    assert aligned["plan"]["padding_bytes"] == 303_296 * 61 * 128
    assert main(["plan", *PUBLISHED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == packed


def test_the_cache_takes_what_a_gpu_leaves(capsys: pytest.CaptureFixture[str]):
    words = ["--tp", "8", "--weights", "84.11GiB", "--other", "5.13GiB", "--workspace-cap", "131072"]
    assert main(["plan", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    left = size("139.81GiB") * 9 // 10 - size("84.11GiB") - size("5.13GiB")
    assert found["budget"] == left - found["prefill_bytes"]
    assert f"{found['budget'] / GIB:.2f}" == "35.42"


def test_a_model_from_its_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "q_lora_rank": 64,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--config", str(path), "--budget", "1MiB", "--block-size", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    assert found["token_bytes"] == 3 * 144 * 2
    assert found["num_blocks"] == 2**20 // (16 * 3 * 144 * 2)


def test_help_is_the_options(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--block-size" in text
    assert "--compare" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "deepseek-r9"], "deepseek-r9"),
        (["--tp", "3"], "num_heads=128 is not divisible by tp=3"),
        (["--budget", "lots"], "size 'lots' is no number of bytes, such as 4GiB or 512MB"),
        (["--gpu", "h2000"], "gpu 'h2000' is not one of h100-80gb, h200, cuda or a size"),
        (["--weights", "200GiB"], "must be positive"),
        (["--utilization", "most"], "utilization 'most' is no number from 0 to 1"),
        (["--align", "x"], "--align"),
        (["--colour", "red"], "--colour"),
        (["--compare", "--format", "fp3"], "cache format 'fp3' is not one of"),
        (["--prefill", "lazy"], "prefill 'lazy' is not one of profile, direct, joined, padded"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_2(words, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 2**32),
        ("512 MiB", 2**29),
        ("1.5kb", 1500),
        ("7", 7),
        ("22.0568gib", 23_683_308_663),
        ("9B", 9),
    ],
)
def test_sizes(text: str, expected: int):
    assert size(text) == expected


def test_a_size_is_a_gpu():
    assert gpu_bytes("80GB") == 80_000_000_000
    assert gpu_bytes("h100-80gb") == size("79.22GiB")
