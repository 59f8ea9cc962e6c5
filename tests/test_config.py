"""Presets against the figures published for them, and config.json files against presets."""

import dataclasses
import json

import pytest

from mla_ref.case import Case
from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.huggingface import FAMILIES
from mla_ref.presets import PRESETS, preset

V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
V2_LITE = V3 | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}


def without(data: dict, key: str) -> dict:
    return {k: v for k, v in data.items() if k != key}


def facts(config: MLAConfig) -> MLAConfig:
    return dataclasses.replace(config, name="", source="")


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3", "0.135234"),
        ("deepseek-r1", "0.135234"),
        ("deepseek-v2-lite", "0.114721"),
        ("kimi-k2", "0.130861"),
        ("kimi-k2-0905", "0.144680"),
        ("mistral-small-4", "0.194969"),  # 2.2058280296 / sqrt(128) = 0.1949694947
        ("moonlight-16b-a3b", "0.072169"),
        ("glm-4.7-flash", "0.062500"),
    ],
)
def test_softmax_scale_is_the_published_one(name, scale):
    assert f"{preset(name).softmax_scale:.6f}" == scale


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("deepseek-v3", 576),
        ("minicpm3-4b", 288),
        ("mistral-small-4", 320),
        ("glm-5.3-flash", 512),
        ("a.x-k2", 160),
    ],
)
def test_entry_width(name, width):
    assert preset(name).entry_width == width


def test_longcat_scales_are_the_published_ones():
    config = preset("longcat-flash")
    assert config.q_lora_scale == 2.0
    assert f"{config.kv_lora_scale:.4f}" == "3.4641"


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_every_preset_has_a_source_and_survives_json(config):
    assert config.source
    assert preset(config.name) is config
    case = Case(problem="attention", config=config, q_lens=(1,), kv_lens=(5,))
    assert Case.from_json(case.to_json()) == case


def test_unknown_preset_names_the_close_ones():
    with pytest.raises(ValueError, match=r"preset 'DeepSeekV3' is not known; did you mean deepseek-v3 or"):
        preset("DeepSeekV3")
    with pytest.raises(ValueError, match=r"preset 'qqq' is not known; known are deepseek-v2, "):
        preset("qqq")


@pytest.mark.parametrize(("data", "name"), [(V3, "deepseek-v3"), (V2_LITE, "deepseek-v2-lite")])
def test_from_hf_reads_the_old_style(data, name):
    assert facts(MLAConfig.from_hf(data)) == facts(preset(name))


@pytest.mark.parametrize(("data", "name"), [(V3, "deepseek-v3"), (V2_LITE, "deepseek-v2-lite")])
def test_from_hf_reads_the_new_style(data, name):
    scaling = without(data["rope_scaling"], "type") | {"rope_type": "yarn", "rope_theta": 10000.0}
    new = without(without(data, "rope_scaling"), "rope_theta") | {"rope_parameters": scaling}
    assert facts(MLAConfig.from_hf(new)) == facts(preset(name))


def test_from_hf_reads_a_file_and_a_folder(tmp_path):
    folder = tmp_path / "DeepSeek-V3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(V3))
    config = MLAConfig.from_hf(folder)
    assert config == MLAConfig.from_hf(str(folder / "config.json"))
    assert config.name == "DeepSeek-V3"
    assert config.source == str(folder / "config.json")


def test_from_hf_reads_the_text_model_of_a_multimodal_one():
    assert facts(MLAConfig.from_hf({"model_type": "x_vl", "text_config": V3})) == facts(preset("deepseek-v3"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, RopeConfig()),
        ({"rope_scaling": {"type": "default", "factor": 40}}, RopeConfig()),
        ({"rope_interleave": False, "rope_scaling": None}, RopeConfig(interleaved=False)),
        ({"model_type": "minicpm3", "rope_scaling": None}, RopeConfig(interleaved=False)),
        ({"model_type": "kimi_linear"}, RopeConfig(rotate=False)),
        ({"qk_rope_head_dim": 0}, RopeConfig(rotate=False)),
        ({"rope_scaling": None, "rope_theta": 5e4}, RopeConfig(theta=5e4)),
    ],
)
def test_from_hf_reads_the_rotation(changes, expected):
    assert MLAConfig.from_hf(V3 | changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "table_scale", "softmax_factor"),
    [
        # m(x) = 0.1 x ln 40 + 1: m(1) = 1.368888, m(0.707) = 1.260804
        ({}, "1.000000", "1.873854"),
        ({"mscale": 0.707}, "0.921042", "1.873854"),
        ({"mscale": None, "mscale_all_dim": None}, "1.368888", "1.000000"),
        ({"mscale": 0.707, "mscale_all_dim": 0.0}, "1.368888", "1.000000"),
        ({"mscale": None}, "1.368888", "1.873854"),
        ({"attention_factor": 1.25}, "1.250000", "1.873854"),
        ({"factor": 1.0}, "1.000000", "1.000000"),
    ],
)
def test_from_hf_reads_both_magnitudes(changes, table_scale, softmax_factor):
    config = MLAConfig.from_hf(V3 | {"rope_scaling": V3["rope_scaling"] | changes})
    assert f"{config.rope.table_scale:.6f}" == table_scale
    assert f"{config.softmax_scale * 192**0.5:.6f}" == softmax_factor


def test_from_hf_reads_longcat_mistral_and_glm():
    longcat = V3 | {
        "model_type": "longcat_flash",
        "hidden_size": 6144,
        "num_layers": 28,
        "rope_scaling": None,
    }
    config = MLAConfig.from_hf(longcat)
    assert (config.q_lora_scale, config.num_layers) == (2.0, 56)
    scaling = V3["rope_scaling"] | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
    mistral = MLAConfig.from_hf(V3 | {"model_type": "mistral4", "rope_scaling": scaling})
    assert (mistral.llama4_beta, mistral.llama4_max_position) == (0.1, 8192)
    glm = MLAConfig.from_hf(V3 | {"model_type": "glm_moe_dsa", "rms_norm_eps": 1e-5})
    assert glm.beyond
    assert glm.rms_norm_eps == 1e-6
    assert MLAConfig.from_hf(V3 | {"model_type": "glm5_next_text", "rms_norm_eps": 1e-5}).rms_norm_eps == 1e-5


def scaled(**changes: object) -> dict:
    return V3 | {"rope_scaling": V3["rope_scaling"] | changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (V3 | {"model_type": "llama"}, r"^config.json: model_type is 'llama', must be one of deepseek_v2, "),
        (V3 | {"model_type": 3}, r"model_type is 3, must be one of"),
        (without(V3, "model_type"), r"^config.json: model_type is missing$"),
        (without(V3, "q_lora_rank"), r"q_lora_rank is missing"),
        (without(V3, "v_head_dim"), r"v_head_dim is missing"),
        (without(V3, "rope_theta"), r"rope_theta is missing"),
        (V3 | {"kv_lora_rank": "512"}, r"kv_lora_rank is '512', must be an integer"),
        (V3 | {"kv_lora_rank": True}, r"kv_lora_rank is True, must be an integer"),
        (V3 | {"hidden_size": 0}, r"hidden_size is 0, must be at least 1"),
        (V3 | {"num_key_value_heads": 8}, r"num_key_value_heads is 8, must be num_attention_heads=128"),
        (V3 | {"attention_bias": 1}, r"attention_bias is 1, must be true or false"),
        (V3 | {"rope_scaling": "yarn"}, r"rope_scaling is 'yarn', must be an object"),
        (V3 | {"text_config": 3}, r"text_config is 3, must be an object"),
        (scaled(type="longrope"), r"rope_scaling: type is 'longrope', must be one of default, yarn"),
        (scaled(factor="40"), r"rope_scaling: factor is '40', must be a finite number"),
        (scaled(factor=float("inf")), r"factor is inf, must be a finite number"),
        (scaled(factor=-2), r"rope: factor is -2.0, must be above 0"),
        (scaled(mrope_section=[1]), r"mrope_section is \[1\], is not a known setting"),
        (scaled(llama_4_scaling_beta=0.1), r"llama_4_scaling_beta is 0.1, is not a known setting"),
        (scaled(partial_rotary_factor=0.5), r"partial_rotary_factor is 0.5, must be 1 or qk_rope_head_dim"),
        (
            V3 | {"rope_parameters": {"rope_type": "default"}},
            r"rope_scaling is .*, disagrees with rope_parameters",
        ),
    ],
)
def test_from_hf_refuses_by_name(data, message):
    with pytest.raises(ValueError, match=message) as caught:
        MLAConfig.from_hf(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[1]", "expected an object, got list"), (None, "No such file")]
)
def test_from_hf_refuses_a_bad_file(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        MLAConfig.from_hf(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling": "linear"}, "rope: scaling 'linear' is not one of default, yarn"),
        ({"theta": 1.0}, "rope: theta is 1.0, must be above 1"),
        ({"factor": 0.0}, "rope: factor is 0.0, must be above 0"),
    ],
)
def test_rope_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**changes)


DIMS = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "max_position": "max_position_embeddings",
}


@pytest.fixture(scope="module")
def config_classes():
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers' own config classes"
    )
    return transformers.CONFIG_MAPPING


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_transformers_writes_is_read_back(family, config_classes):
    if family in ("kimi_k2", "plm"):
        pytest.skip(f"transformers has no config class for {family}")
    theirs = config_classes[family]()
    ours = MLAConfig.from_hf(theirs.to_dict() | {"model_type": family})
    for field, name in DIMS.items():
        assert getattr(ours, field) == getattr(theirs, name), field
    assert ours.attention_bias == theirs.attention_bias


@pytest.mark.parametrize(
    "name", [name for name, config in PRESETS.items() if config.source.startswith("transformers ")]
)
def test_presets_are_the_defaults_of_transformers(name, config_classes):
    """Read from the class: an instance refuses fields that its layers do not share."""
    config = preset(name)
    family = config.source.split()[1].strip(",:;")
    theirs = config_classes[family if hasattr(config_classes[family], "kv_lora_rank") else f"{family}_text"]
    defaults = {field: getattr(theirs, field) for field in dir(theirs) if not field.startswith("__")}
    for field, theirs_name in DIMS.items():
        if defaults.get(theirs_name) is not None and not isinstance(defaults[theirs_name], property):
            assert getattr(config, field) == defaults[theirs_name], field
