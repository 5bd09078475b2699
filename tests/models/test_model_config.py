from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.gguf import GGUFFile
from penstock.checkpoint.source import BUILT_IN, Checkpoint, resolve
from penstock.core.errors import StartupError
from penstock.models.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling, _from_gguf, read_config
from penstock.text.tokenizer import load_tokenizer

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_values(
        architecture: str = "Llama", generation: dict[str, Any] | None = None, **values: Any
    ) -> ModelConfig:
        merged = {**BASE, "architectures": [f"{architecture}ForCausalLM"], **values}
        (tmp_path / "config.json").write_text(json.dumps(merged))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_config(Checkpoint("tiny", "folder", tmp_path))

    return read_values


def test_defaults_follow_the_family(read: Read) -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (8, 8, 10000.0)
    assert not any((config.tie_embeddings, config.attention_bias, config.output_bias, config.qk_norm))
    qwen = read("Qwen2", attention_bias=False)
    assert qwen.attention_bias
    assert not qwen.output_bias
    assert read("Qwen3").qk_norm
    assert read(attention_bias=True).output_bias


def test_both_spellings_of_rope_and_dtype(read: Read) -> None:
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}, torch_dtype="bfloat16")
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="bfloat16")
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 256)
    assert old.dtype == "bfloat16"
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == LinearScaling(2.0)


def test_scaling_that_was_added_to_a_file_with_the_newer_spelling_holds(read: Read) -> None:
    """As the README of Qwen3 says to add YaRN, to what transformers 5 has written."""
    new = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    added = read(rope_parameters=new, rope_scaling=yarn)
    assert added == read(rope_theta=1e6, rope_scaling=yarn)
    assert isinstance(added.rope_scaling, YarnScaling)
    assert read(rope_parameters=new, rope_scaling=None) == read(rope_theta=1e6)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 4.0}, LinearScaling(4.0)),
    ],
)
def test_gguf_scales_linearly_where_it_names_a_factor_alone(
    fields: dict[str, Any], scaling: LinearScaling | None
) -> None:
    file = GGUFFile(resolve(BUILT_IN).path)
    file.metadata |= {f"llama.{name}": value for name, value in fields.items()}
    assert _from_gguf(file).rope_scaling == scaling


def test_gguf_says_where_yarn_begins_and_ends() -> None:
    file = GGUFFile(resolve(BUILT_IN).path)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 8.0}
    file.metadata |= {f"llama.rope.scaling.{name}": value for name, value in yarn.items()}
    scaling = _from_gguf(file).rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.beta_fast, scaling.beta_slow) == (8.0, 1.0)


def test_gguf_without_causal_attention_is_refused() -> None:
    file = GGUFFile(resolve(BUILT_IN).path)
    file.metadata["llama.attention.causal"] = False
    with pytest.raises(StartupError, match=r"attention\.causal False is not supported"):
        _from_gguf(file)


def test_yarn_extends_the_context(read: Read) -> None:
    config = read(rope_scaling={"type": "yarn", "factor": 4.0})
    assert isinstance(config.rope_scaling, YarnScaling)
    assert config.rope_scaling.original_max_position == 1024
    assert config.max_position == 4096


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_other_scalings_are_refused(read: Read, kind: str) -> None:
    with pytest.raises(StartupError, match=rf"'{kind}' is not supported; supported: linear, llama3, yarn"):
        read(rope_scaling={"type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("architecture", "values", "windows"),
    [
        ("Mistral", {"sliding_window": 16}, (16, 16, 16, 16)),
        ("Mistral", {"sliding_window": None}, (0, 0, 0, 0)),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}, (0, 0, 0, 0)),
        ("Qwen2", {"sliding_window": 16}, (0, 0, 0, 0)),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 16)),
        ("Qwen3Moe", {"sliding_window": 16, "use_sliding_window": True}, (16, 16, 16, 16)),
        (
            "Qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (16, 0, 16, 0),
        ),
    ],
)
def test_windows(read: Read, architecture: str, values: dict[str, Any], windows: tuple[int, ...]) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert read(architecture, **experts, **values).windows == windows


def test_layers_with_experts(read: Read) -> None:
    values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe = read("Qwen3Moe", **values, decoder_sparse_step=2, mlp_only_layers=[3]).moe
    assert moe is not None
    assert moe.layers == {1}
    assert moe.num_experts == 4
    assert read().moe is None


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [7, 2, 9]}, (2, 7, 9)),
        ([5, 6], {"eos_token_id": 6}, (5, 6)),
        (None, {}, ()),
    ],
)
def test_end_tokens_come_from_both_files(read: Read, own: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert read(generation=generation, eos_token_id=own).eos_ids == expected


def test_the_engine_ends_answers_where_the_tokenizer_does(read: Read, tmp_path: Path) -> None:
    built_in = resolve(BUILT_IN)
    assert read_config(built_in).eos_ids == load_tokenizer(built_in).eos_ids == (2, 0)
    config = {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read(eos_token_id=2).eos_ids == (2, 7)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))  # as transformers 5 does
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}))
    assert read(eos_token_id=2).eos_ids == (2, 7)
    for broken in ("{", "[]", '{"eos_token": "x"}', '{"eos_token": 7, "added_tokens_decoder": {"a": {}}}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        assert read(eos_token_id=2).eos_ids == (2,)


def test_recommended_sampling_is_read(read: Read) -> None:
    """`do_sample` says nothing of a server's requests, and what is no number recommends nothing."""
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "max_length": 7}
    assert read(generation=generation).sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert read(generation={}).sampling == {}


def test_the_generation_config_says_where_to_exit_early(read: Read) -> None:
    assert read(generation={"assistant_early_exit": 2}).exit_layers == 2
    assert read(generation={}).exit_layers is None
    file = GGUFFile(resolve(BUILT_IN).path)
    assert _from_gguf(file).sampling == {}
    keys = {"temp": 0.699999988079071, "top_k": 20, "penalty_repeat": 1.0499999523162842, "sequence": "kpt"}
    file.metadata |= {f"general.sampling.{name}": value for name, value in keys.items()}
    assert _from_gguf(file).sampling == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    assert read_config(resolve(BUILT_IN)).sampling == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["BertModel"]}, r"BertModel is not supported; supported: .*Qwen3MoeForCausalLM"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"vocab_size": None}, "vocab_size must be a positive whole number, not None"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "for full_attention alone"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq"),
    ],
)
def test_what_cannot_run_is_refused(read: Read, values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read(**values)


def test_unreadable_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"cannot read .*config\.json"):
        read_config(Checkpoint("tiny", "folder", tmp_path))
