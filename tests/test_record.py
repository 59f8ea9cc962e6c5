"""Recordings: what a real model gives its attention, stored, read back, and judged like any other case."""

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

from mla_ref.case import Case, Recording
from mla_ref.config import MLAConfig
from mla_ref.problem import problem
from mla_ref.recording import SHAPES, read, recorded, recorded_tensor, shapes_of
from mla_ref.values import integers
from oracles.bounds import ADMISSIBLE
from oracles.command import main
from oracles.compare import within
from oracles.recorded import STAGES, passes, record, watching, write
from oracles.shrink import smallest
from oracles.verdict import NOT_RUN, PASS
from oracles.verify import backends, find_backend, judge

transformers = pytest.importorskip("transformers", reason="models are loaded by transformers")
safetensors = pytest.importorskip("safetensors.torch", reason="recordings are written by safetensors")

CHECKPOINTS = Path(__file__).parent.parent / "evals" / "checkpoints"
PROMPTS = (
    "Question: Tom has 5 apples and buys 7 more. How many apples does Tom have?\nAnswer:",
    "Ann runs 12 miles a day for 3 days. Then she rests for 2 days. How many miles?",
    "3 + 4 = 7. A short one.",
)
LAYERS = (0, 3)

TINY = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}


def tiny(family, **changes):
    """A causal model that nobody trained, and its attention."""
    config = transformers.CONFIG_MAPPING[family](**TINY | changes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train(False)
    return model, MLAConfig.from_hf(config.to_dict())


def tokens(seed, *lengths):
    return [integers(seed, f"text/{i}", 61, n).tolist() for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """{(layer, stage): file} of a trained checkpoint, by the command line."""
    out = tmp_path_factory.mktemp("recordings")
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    words += [word for layer in (*LAYERS, *LAYERS) for word in ("--layer", str(layer))]
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["record", str(CHECKPOINTS / "mini"), "--out", str(out), *words]) == 0
    lines = printed.getvalue().splitlines()
    assert len(lines) == len(LAYERS) * len(STAGES) + 1
    assert lines[-1] == f"{len(lines) - 1} recordings of mini in bfloat16"
    found = {re.fullmatch(r"mini-layer(\d)-(\w+)", path.stem).groups(): path for path in out.iterdir()}
    return {(int(layer), stage): path for (layer, stage), path in found.items()}


def test_every_layer_and_stage_is_one_case(recordings):
    assert set(recordings) == {(layer, stage) for layer in LAYERS for stage in STAGES}
    for (layer, stage), path in recordings.items():
        case, source, tensors = read(path)
        assert (source["model"], source["layer"], source["stage"]) == ("mini", layer, stage)
        assert source["softmax_scale"] == case.config.softmax_scale
        assert re.fullmatch("[0-9a-f]{64}", source["layer_sha256"])
        assert {name: tuple(x.shape) for name, x in tensors.items()} == shapes_of(case)
        assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
        assert (case.dtype, case.cache_format, case.regime) == ("bfloat16", "bf16", "recorded")
        assert Case.from_json(case.to_json()) == case
        assert all(x.isfinite().all() for x in tensors.values())
    before, after = (read(recordings[0, stage]).case for stage in ("prefill", "chunked"))
    assert before.q_lens == before.kv_lens
    assert after.kv_lens == tuple(a + b for a, b in zip(before.kv_lens, after.q_lens, strict=True))
    assert read(recordings[0, "mtp"]).case.q_lens == (2, 2, 2)
    assert read(recordings[0, "decode"]).case.q_lens == (1, 1, 1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("deepseek_v3", {"q_lora_rank": 20}), ("deepseek_v2", {"q_lora_rank": None})],
    ids=["v3", "v2-lite"],
)
def test_what_is_recorded_is_what_their_attention_computed_on(family, changes, seed, tmp_path):
    """Their own output, in float32, is within the bound of ours on the recorded inputs."""
    model, config = tiny(family, **changes)
    outputs = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda _, given: outputs.append(given[0][0])
    )
    texts = tokens(seed, 19, 9)
    numerics = find_backend("mla_ref.naive").numerics
    for index, stage, case, tensors, source in record(model, config, texts, [1]):
        assert index == 1
        write(tmp_path / "one.safetensors", case, tensors, source)
        found = read(tmp_path / "one.safetensors").case
        inputs = problem("attention").materialize(found, torch.device("cpu"))
        theirs = torch.cat(outputs[STAGES.index(stage) :: len(STAGES)])
        want = ADMISSIBLE["attention"](inputs, numerics)["out"]
        finding = within("out", theirs.unflatten(-1, (config.num_heads, -1)), want, "t h v", inputs)
        assert finding.ok, finding.detail
        assert finding.num_checked == sum(found.q_lens) * config.num_heads * config.v_head_dim
    assert len(outputs) == len(texts) * len(STAGES)


def test_a_watched_model_computes_what_it_always_does(seed):
    model, config = tiny("deepseek_v3", q_lora_rank=20)
    ids = torch.tensor(tokens(seed, 12))
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with watching(model, config, [0, 1]) as found:
            watched = model(input_ids=ids).logits
        assert torch.equal(plain, model(input_ids=ids).logits)
    assert torch.equal(plain, watched)
    assert [len(found[index].calls) for index in (0, 1)] == [1, 1]


JUDGED = [
    name
    for name, b in backends().items()
    if b.problem in ("attention", "latent_attention", "cache_write", "cache_gather")
]


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("stage", ["chunked", "decode"])
def test_every_backend_holds_on_real_activations(name, stage, recordings):
    backend = replace(find_backend(name), variants={})
    case = replace(read(recordings[3, stage]).case, problem=backend.problem)
    verdicts = judge(backend, case)
    assert not [v for v in verdicts if v.status not in (PASS, *NOT_RUN)]
    if verdicts[0].status not in NOT_RUN:
        assert {v.status for v in verdicts} == {PASS}


def one_key_short(*given):
    plain = find_backend("mla_ref.latent").fn
    at = 5  # cache_seqlens
    return plain(*given[:at], (given[at] - 1).clamp(min=0), *given[at + 1 :])


def test_a_broken_backend_fails_on_them_and_the_failure_can_be_made_small(recordings):
    broken = replace(find_backend("mla_ref.latent"), fn=one_key_short)

    def fails(case):
        return any(v.status == "fail" for v in judge(broken, case, oracles=["value"]))

    case = replace(read(recordings[0, "decode"]).case, problem="latent_attention")
    assert fails(case)
    small = smallest(case, fails)
    assert fails(small)
    assert sum(small.kv_lens) * small.config.num_heads < sum(case.kv_lens) * case.config.num_heads


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp32"])
def test_entries_may_be_stored_in_another_format(fmt, recordings):
    case = replace(read(recordings[0, "decode"]).case, cache_format=fmt)
    assert {v.status for v in judge(find_backend("mla_ref.naive"), case)} == {PASS}


def test_run_and_replay_take_a_recording(recordings, capsys):
    path = str(recordings[0, "decode"])
    words = [
        "--backend",
        "mla_ref.latent",
        "--backend",
        "mla_ref.cache_write",
        "--oracle=contract",
        "--jobs=1",
    ]
    assert main(["run", "--case", path, *words, "--format=bf16", "--format=fp16"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mla_ref\.latent +latent_attention +2 +0 +0", out, re.MULTILINE)
    assert re.search(r"^mla_ref\.cache_write +cache_write +2 +0 +0", out, re.MULTILINE)
    assert main(["replay", path, "--backend=mla_ref.latent", "--oracle=value"]) == 0
    assert "latent_attention mini h=4 q=1,1,1" in capsys.readouterr().out
    assert main(["replay", path, "--backend=mla_ref.rope"]) == 2
    assert "backend 'mla_ref.rope' implements rope, but the case is of attention" in capsys.readouterr().err
    assert main(["replay", path]) == 2
    assert "a recording names no backend" in capsys.readouterr().err


def test_lengths_and_heads_may_differ_from_the_recorded_ones(recordings):
    was = read(recordings[0, "chunked"])
    (q0, q1, _), (k0, k1, _) = was.case.q_lens, was.case.kv_lens
    case = replace(
        was.case,
        q_lens=(2, q1, 0, q0 + 1),
        kv_lens=(3, k1, 0, k0 + 2),
        config=replace(was.case.config, num_heads=2),
    )
    query, latent = recorded_tensor(case, "q_nope"), recorded_tensor(case, "kv_c")
    q, c = was.tensors["q_nope"].double()[:, :2], was.tensors["kv_c"].double()
    again = torch.cat([q[q0 - 1 : q0], q[:q0]])
    assert torch.equal(query, torch.cat([q[q0 - 2 : q0], q[q0 : q0 + q1], again]))
    assert torch.equal(latent, torch.cat([c[:3], c[k0 : k0 + k1], c[:k0], c[:2]]))
    assert recorded_tensor(case, "w_uv").shape[0] == 2
    inputs = problem("attention").materialize(case, torch.device("cpu"))
    assert inputs.q_nope.shape[:2] == (sum(case.q_lens), 2)


def test_what_a_recording_cannot_give_is_a_reason(recordings):
    case = read(recordings[0, "decode"]).case
    for changed, reason in (
        (replace(case, problem="rope"), "a recording holds no inputs of rope"),
        (replace(case, recording=None), "the regime is recorded, but there is no recording"),
        (replace(case, config=replace(case.config, num_heads=5)), "num_heads is 5, but 4 were recorded"),
        (
            replace(case, config=replace(case.config, kv_lora_rank=64)),
            "kv_lora_rank is 64, but was recorded as 128",
        ),
    ):
        contract = problem(changed.problem)
        assert contract.why_not(changed) == reason
        with pytest.raises(ValueError, match=reason):
            contract.materialize(changed, torch.device("cpu"))
    assert (
        problem("attention").why_not(replace(case, regime="plain", config=replace(case.config, num_heads=8)))
        is None
    )


def test_another_hash_is_refused_with_both(recordings, tmp_path, capsys):
    content = bytearray(recordings[0, "decode"].read_bytes())
    content[-1] ^= 1
    path = tmp_path / "changed.safetensors"
    path.write_bytes(content)
    case = read(recordings[0, "decode"]).case
    named = replace(case, recording=Recording(path=str(path), sha256=case.recording.sha256))
    there = read(path).case.recording.sha256
    message = f"{path}: its sha256 is {there}, but the case names {case.recording.sha256}"
    with pytest.raises(ValueError, match=re.escape(message)):
        recorded(named.recording)
    assert main(["replay", named.to_json(), "--backend", "mla_ref.naive"]) == 2
    assert message in capsys.readouterr().err
    gone = replace(case, recording=Recording(path=str(tmp_path / "gone"), sha256="0"))
    assert main(["replay", gone.to_json(), "--backend", "mla_ref.naive"]) == 2
    assert "gone: No such file" in capsys.readouterr().err


def test_the_file_is_plain_safetensors(recordings):
    path = recordings[3, "mtp"]
    ours, theirs = read(path).tensors, safetensors.load_file(path)
    assert set(ours) == set(theirs) == set(SHAPES)
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def safetensors_of(header, data=b"", size=None):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def ours(recordings, **changes):
    """The header of a recording with one thing changed, and its data."""
    content = recordings[0, "decode"].read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name, value in changes.items():
        if value is None:
            del header[name]
        else:
            header[name] = header[name] | value
    return safetensors_of(header, content[8 + size :])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda r: b"", "is no safetensors file"),
        (lambda r: safetensors_of(b"{}", size=2**40), "is no safetensors file"),
        (lambda r: safetensors_of(b"[1]"), "is no safetensors file"),
        (lambda r: safetensors_of(b"{nonsense"), "is no safetensors file"),
        (lambda r: safetensors_of({"a": 1}), "is no recording: its header does not say"),
        (lambda r: ours(r, kv_c={"data_offsets": [0, 2**40]}), r"a tensor \[\d+, 128\] of BF16 is at 0 … 1"),
        (lambda r: ours(r, kv_c={"data_offsets": [8, 4]}), "is at 8 … 4 of"),
        (lambda r: ours(r, kv_c={"dtype": "I64"}), "type I64 is not one of F64, F32, F16, BF16"),
        (lambda r: ours(r, k_pe=None), "k_pe is missing"),
        (lambda r: ours(r, k_pe={"shape": [32, 65], "data_offsets": [0, 4160]}), r"k_pe is \[32, 65\], but"),
        (lambda r: ours(r, __metadata__={"case": "{}"}), "case: missing|missing .* required"),
        (lambda r: ours(r, __metadata__={"source": "{"}), "Expecting"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_by_name(content, message, recordings, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content(recordings))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*({message})"):
        read(path)


def test_a_text_passes_in_four_steps():
    assert passes(8) == (4, 1, 2, 1)
    assert passes(21) == (10, 8, 2, 1)
    with pytest.raises(ValueError, match="a text has 7 tokens, must have at least 8"):
        passes(7)


def test_models_that_attend_otherwise_are_refused(seed):
    model, config = tiny("deepseek_v3", q_lora_rank=20)
    ids = torch.tensor(tokens(seed, 12))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    cases = [
        (config, {"attention_mask": padded}, "layer 1: its mask is not causal alone"),
        (replace(config, qk_nope_head_dim=24), {}, "layer 1: queries are 24 wide, not 32"),
        (
            replace(config, rope=replace(config.rope, mscale_all_dim=1.0)),
            {},
            r"layer 1: its scale is .*, but \w+ has",
        ),
    ]
    for other, words, message in cases:
        with pytest.raises(ValueError, match=message), torch.no_grad(), watching(model, other, [1]):
            model(input_ids=ids, **words)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=padded)  # nobody is watching any more
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Identity()
    with (
        pytest.raises(ValueError, match=r"layer 1: \w+ has 1 layers with a kv_b_proj"),
        watching(model, config, [1]),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to record: give --prompt TEXT or --prompts FILE"),
        (["--prompt", "1"], "a text has . tokens, must have at least 8"),
        (["--prompt", PROMPTS[0], "--layer=4"], "--layer 4: mini has 4 layers, from 0"),
        (["--prompt", PROMPTS[0], "--dtype=int8"], "--dtype 'int8' is not one of bfloat16, float16, float32"),
        (["--prompts", "nowhere.txt"], "No such file"),
        (
            ["--prompts", str(CHECKPOINTS / "mini" / "model.safetensors")],
            r"model\.safetensors: 'utf-8' codec",
        ),
        (["--prompt", PROMPTS[0], "--device=nope"], "'nope': "),
    ],
)
def test_what_cannot_be_recorded_is_said_in_one_line(words, message, tmp_path, capsys):
    assert main(["record", str(CHECKPOINTS / "mini"), "--out", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert len(err.splitlines()) == 1


def test_tensors_must_be_those_of_the_case(recordings, tmp_path):
    case, source, tensors = read(recordings[0, "decode"])
    with pytest.raises(ValueError, match="recording: its tensors are"):
        write(tmp_path / "x.safetensors", replace(case, q_lens=(1, 1, 2)), tensors, source)
