"""Settings from YAML and flags."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from penstock.cli import serve
from penstock.cli.environment import settings_from_environment
from penstock.cli.settings import read_yaml
from penstock.core.errors import StartupError
from penstock.engine.settings import EngineConfig
from penstock.gateway.settings import LimitConfig
from penstock.observability.settings import LogConfig
from penstock.settings import Settings, settings_from_mapping
from penstock.worker.protocol import Start, frame, read_control


def parse(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.read_settings(parser.parse_args(["serve", *arguments]))


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("model: from-file\nengine: {max_seqs: 8, kv_memory_gib: 2}\nserver: {port: 9000, host: 0.0.0.0}\n")
    settings = parse("--config", str(file), "--port", "9001", "--max-model-len", "100")
    assert (settings.model, settings.server.host, settings.server.port) == ("from-file", "0.0.0.0", 9001)
    assert (settings.engine.max_seqs, settings.engine.kv_memory_gib, settings.engine.max_model_len) == (8, 2.0, 100)
    assert parse("other", "--config", str(file)).model == "other"
    assert parse() == Settings()


def test_every_section_has_variables() -> None:
    """A section is given field by field, also one that is optional or inside another; what has names that users choose
    is given as a whole."""
    given = {
        "PENSTOCK_OBSERVABILITY__OTLP_ENDPOINT": "http://127.0.0.1:4318",
        "PENSTOCK_JWT__ALGORITHMS": "[ES256]",
        "PENSTOCK_CACHE__SEMANTIC__THRESHOLD": "0.9",
        "PENSTOCK_TENANT_DEFAULTS__MODEL_LIMITS": "{big: {concurrent: 1}}",
        "PENSTOCK_ENGINE__SAMPLING_DEFAULTS": "{top_k: 20}",
        "PENSTOCK_CLASSES": "{fast: {ttft_ms: 100}}",
        "PENSTOCK_SERVER__LOG_LEVEL": "error",
        "PENSTOCK_SERVER__HOST": "1.5",
    }
    assert settings_from_environment(given) == {
        "observability": {"otlp_endpoint": "http://127.0.0.1:4318"},
        "jwt": {"algorithms": ["ES256"]},
        "cache": {"semantic": {"threshold": 0.9}},
        "tenant_defaults": {"model_limits": {"big": {"concurrent": 1}}},
        "engine": {"sampling_defaults": {"top_k": 20}},
        "classes": {"fast": {"ttft_ms": 100}},
        "server": {"log_level": "error", "host": "1.5"},
    }


def test_environment_stands_between_flags_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("model: from-file\nengine: {max_seqs: 8}\nserver: {port: 9000, host: 0.0.0.0}\n")
    given = {
        "PENSTOCK_MODEL": "123",  # text stays text
        "PENSTOCK_SERVER__PORT": "9001",
        "PENSTOCK_SERVER__OPEN": "true",
        "PENSTOCK_ENGINE__MAX_SEQS": "",  # empty: as if it were not there
        "PENSTOCK_ENGINE__KV_MEMORY_GIB": "2",
        "PENSTOCK_CACHE__SEMANTIC__ROUTES": "[/v1/completions]",
        "PENSTOCK_TENANTS": "{acme: {weight: 2}}",
        "PENSTOCK_URL": "http://127.0.0.1:1",  # of clients
        "PENSTOCK_SERVER__PROT": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = parse("--config", str(file))
    assert (settings.model, settings.server.port, settings.server.host) == ("123", 9001, "0.0.0.0")
    assert (settings.engine.max_seqs, settings.engine.kv_memory_gib) == (8, 2.0)
    assert settings.server.open
    assert settings.cache.semantic.routes == ("/v1/completions",)
    assert settings.tenants["acme"].weight == 2
    assert parse("--config", str(file), "--port", "9002").server.port == 9002
    ignored = capsys.readouterr().err.splitlines()[0]
    assert (
        ignored == "penstock: PENSTOCK_SERVER__PROT is ignored: no such setting (did you mean PENSTOCK_SERVER__PORT?)"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engin": {}}, "engin is not a setting"),
        ({"port": 9000}, r"^port is not a setting \(did you mean server\.port\?\); known: model"),
        ({"max-model-len": 4096}, r"^max-model-len is not a setting \(did you mean engine\.max_model_len\?\)"),
        (
            {"engine": {"max_sequences": 3}},
            r"engine\.max_sequences is not a setting \(did you mean max_seqs\?\); known: .*max_seqs",
        ),
        ({"engine": {"max_seqs": "many"}}, r"engine\.max_seqs must be a whole number"),
        ({"engine": {"max_seqs": True}}, r"engine\.max_seqs must be a whole number"),
        ({"engine": {"prefix_caching": 1}}, r"engine\.prefix_caching must be true or false"),
        ({"engine": {"dtype": "float8"}}, "dtype must be one of"),
        ({"engine": []}, "engine must be a mapping"),
        ({"server": {"port": 70000}}, "port must be between"),
        ({"server": {"port": None}}, r"server\.port must not be empty"),
        ({"server": {"unknown_fields": "keep"}}, r"server\.unknown_fields must be one of refuse, ignore"),
        ({"engine": {"sampling_defaults": 1}}, r"engine\.sampling_defaults must be a mapping such as"),
        ({"engine": {"sampling_defaults": {"seed": 1}}}, r"engine\.sampling_defaults takes temp.*, not seed"),
        ({"engine": {"sampling_defaults": {"top_k": 1.5}}}, r"engine\.sampling_defaults needs a number for top_k"),
        ({"engine": {"sampling_defaults": {"top_p": 0}}}, r"engine\.sampling_defaults\.top_p must be above 0"),
        ({"model": ""}, "model must be a name"),
        ({"cache": {"scope": "everyone"}}, r"cache\.scope must be one of tenant, shared"),
        ({"cache": {"memory": 1}}, r"cache\.memory is not a setting .*; known: .*memory_mib"),
        ({"cache": {"semantic": {"routes": ["/v1/embeddings"]}}}, r"cache\.semantic\.routes must be of /v1/chat"),
        ({"cache": {"semantic": {"threshold": 2}}}, r"cache\.semantic\.threshold must be between"),
        ({"tenant_defaults": {"model_limits": []}}, r"tenant_defaults\.model_limits must be a mapping of model names"),
        ({"tenants": {"a": {"model_limits": {"m": {"rpm": 1}}}}}, r"a\.model_limits\.m\.rpm is not a .*: requests_per"),
        (
            {"tenants": {"a": {"model_limits": {"m": {"concurrent": 0}}}}},
            r"a\.model_limits\.m\.concurrent must be above",
        ),
        ({"tenants": {"a": {"model_limits": {"m": None}}}}, r"tenants\.a\.model_limits\.m must be a mapping"),
        ([], "must be a mapping"),
        ({"engine": {1: 2}}, r"engine\.1 is not a setting; known: device"),
        ({"engine": {"device": 0}}, r"engine\.device must be one of auto, cpu, cuda, not 0$"),
        ({"engine": {"max_seqs": 8.0}}, r"engine\.max_seqs must be a whole number, not 8\.0$"),
        ({"engine": {"max_model_len": "1k"}}, r"engine\.max_model_len must be a whole number or null, not '1k'$"),
        ({"engine": {"kv_memory_gib": True}}, r"engine\.kv_memory_gib must be a number or null, not True$"),
        ({"engine": {"sampling_defaults": {"top_k": "x"}}}, "sampling_defaults needs a number for top_k, not 'x'$"),
        ({"server": {"host": 1}}, r"server\.host must be text, not 1$"),
        (
            {"server": {"log_level": "loud"}},
            "log_level must be one of debug, info, warning, error, not 'loud'$",
        ),
        ({"server": {"cors": []}}, r"server\.cors must be a list of names, not \[\]$"),
        ({"server": {"cors": "*"}}, r"server\.cors must be a list of names, not '\*'$"),
        ({"server": {"cors": [1]}}, r"server\.cors must be a list of names, not \[1\]$"),
        ({"cache": {"ttl_seconds": 0}}, r"^cache\.ttl_seconds must be between 1 and"),
        ({"cache": {"semantic": []}}, r"^cache\.semantic must be a mapping$"),
        ({"cache": {"semantic": {"treshold": 1}}}, r"^cache\.semantic\.treshold is not .* mean threshold\?\)"),
        ({"observability": {"otlp_endpoint": "host"}}, r"^observability\.otlp_endpoint must look like http"),
        ({"jwt": {}}, r"^jwt\.issuer must be given$"),
        ({"model": 7}, "^model must be a name or a path, not 7$"),
        ({"state": "rediss"}, "^state must be memory, sqlite:///PATH or redis://HOST:PORT/DB$"),
        ({"state": 1}, "^state must be memory, sqlite:///PATH or redis://HOST:PORT/DB, not 1$"),
        ({"machine_per_hour": 0}, "^machine_per_hour must be above 0$"),
        ({"classes": ["fast"]}, "^classes must be a mapping of names to objectives"),
        ({"classes": {1: {}}}, "^classes must be named by words, not 1$"),
        ({"classes": {"fast": {"ttft_ms": 0}}}, r"^classes\.fast\.ttft_ms must be above 0$"),
        ({"default_class": "fast"}, "^default_class must be one of interactive, standard, batch$"),
        ({"classes": {"fast": None}, "default_class": "batch"}, "^default_class must be one of fast$"),
        ({"tenants": ["acme"]}, "^tenants must be a mapping of names to limits"),
        ({"tenants": {"a b": {}}}, r"^tenants\.a b must be named by up to 64"),
        ({"tenants": {"acme": 1}}, r"^tenants\.acme must be a mapping$"),
        ({"tenants": {"acme": {"default_class": "x"}}}, r"^tenants\.acme\.default_class must be one of interactive"),
        ({"tenant_defaults": {"default_class": "x"}}, r"^tenant_defaults\.default_class must be one of interactive"),
        ({"tenants": {123: {}}}, r"^tenants\.123 must be named by text: put quotes around the name"),
        ({"tenants": {False: {}}}, r"^tenants\.False must be named by text: put quotes"),  # to YAML, `no` is false
        ({"tenants": {"a b": {}}}, r"^tenants\.a b must be named by up to 64 letters, digits"),
        ({"tenant_defaults": {"wait": 1}, "tenants": {"acme": {}}}, r"^tenant_defaults\.wait is not a setting"),
        ({"tenant_defaults": {"model_limits": {1: {}}}}, r"^tenant_defaults\.model_limits must be by names of models"),
        ({"adapters": [{"name": "a b", "path": "p"}]}, r"^adapters\.0\.name must be up to 128 letters"),
        ({"adapters": [{"name": "a"}]}, r"^adapters\.0\.path must be the adapter's folder$"),
        ({"adapters": [{"name": "a", "path": "p"}] * 2}, "^adapters has 'a', which names a model or adapter"),
        ({"adapters": [{"name": "a", "path": "p"}], "models": {"m": {}}}, "^adapters belongs to one of the models"),
        ({"models": {"m": {"adapters": [{"name": "m", "path": "p"}]}}}, r"^models\.m\.adapters has 'm', which names a"),
        ({"models": {"m": {"aliases": ["m"]}}}, r"^models\.m\.aliases has 'm', which names a model or adapter"),
        ({"models": {"m": {"aliases": ["x"]}, "n": {"aliases": ["x"]}}}, r"^models\.n\.aliases has 'x', which names a"),
        ({"models": {"m": {}, "v": {"versions": {"m": 1}, "aliases": ["m"]}}}, r"^models\.v\.aliases has 'm'"),
        ({"models": {"m": {}}, "model": "smollm2-135m"}, "^model must not be given beside models"),
        ({"models": {"m": {}}, "replicas": 2}, "^replicas must not be given beside models"),
        ({"models": {"m": {"adapter_paths": "all"}}}, r"^models\.m\.adapter_paths must be one of folder, any"),
        (
            {"models": {"m": {"adapter_folder": "f", "replicas": 0, "upstreams": [{"url": "http://h"}]}}},
            "needs workers",
        ),
        ({"adapter_folder": "f", "engine": {"max_adapters": 0}}, "needs engine.max_adapters to be above 0"),
        ({"models": {"m": {}, "v": {"versions": {"absent": 1}}}}, "names 'absent', which is not one of the models"),
        ({"consume": {"requests": "q"}}, r"^consume\.url must be given$"),
        ({"models": {"m": {"upstreams": [{"model": "x"}]}}}, r"^models\.m\.upstreams\.0\.url must be given$"),
        ({"prices": 1}, "^prices must be a mapping of model names to prices"),
        ({"prices": {"m": {"input": -1}}}, r"^prices\.m\.input must be between 0 and 1,000,000$"),
    ],
)
def test_errors_name_the_setting(values: object, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        settings_from_mapping(values)


def test_adapters_of_one_model_and_of_several() -> None:
    one = settings_from_mapping({"adapters": [{"name": "a", "path": "p", "aliases": ["b"]}], "adapter_folder": "f"})
    assert one.served[""].adapter_names == ["a", "b"]
    assert one.served[""].adapter_folder == "f"
    own, upstreams = {"adapter_folder": "g"}, {"upstreams": [{"url": "http://h"}]}
    several = settings_from_mapping({"adapter_folder": "f", "models": {"m": {}, "n": own, "u": upstreams}})
    assert [several.served[name].adapter_folder for name in "mnu"] == ["f", "g", None]


def test_a_models_limits_win_over_the_general_ones() -> None:
    defaults = {"concurrent": 9, "model_limits": {"big": {"concurrent": 1}, "small": {"concurrent": 5}}}
    tenant = {"requests_per_minute": 60, "model_limits": {"big": {"requests_per_minute": 6, "concurrent": None}}}
    settings = settings_from_mapping({"tenant_defaults": defaults, "tenants": {"acme": tenant, "other": {}}})
    acme, other = settings.tenants["acme"], settings.tenants["other"]
    assert acme.limits_of(["big"]) == LimitConfig(requests_per_minute=6)
    assert acme.limits_of(["alias", "small"]) == LimitConfig(requests_per_minute=60, concurrent=5)
    assert acme.limits_of(["third"]).concurrent == 9
    assert other.limits_of(["big"]) == LimitConfig(concurrent=1)
    assert settings.tenant_defaults.limits_of(["small"]) == LimitConfig(concurrent=5), "of requests in open mode"


def test_an_empty_section_has_its_defaults() -> None:
    empty = dict.fromkeys(("engine", "server", "classes", "cache", "tenants", "tenant_defaults", "jwt", "prices"))
    assert settings_from_mapping(empty) == Settings()
    settings = settings_from_mapping({"cache": {"semantic": None}, "classes": {"fast": None}, "prices": {7: None}})
    assert settings.cache == Settings().cache
    assert (settings.classes["fast"].rank, settings.default_class) == (0, "fast")
    assert settings.prices["7"].output == 0


def test_a_password_in_a_mistyped_url_is_not_shown() -> None:
    with pytest.raises(StartupError) as error:
        settings_from_mapping({"state": "reddis://:secret@127.0.0.1/0"})
    assert "secret" not in error.value.message


@pytest.mark.parametrize(("top_k", "means"), [(20, 20), (2**70, 0)])
def test_sampling_defaults_reach_the_worker(top_k: int, means: int) -> None:
    start = Start("m", EngineConfig(sampling_defaults={"top_k": top_k, "temperature": 1}), LogConfig())
    assert start.engine.sampling_defaults == {"top_k": means, "temperature": 1}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(start))
        assert read_control(theirs) == start


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    """Of which YAML's reader would use the second, and forget the first."""
    file = tmp_path / "twice.yaml"
    file.write_text("server: {port: 1}\nmodel: a\ntenants:\n  acme: {}\nserver: {host: localhost}\n")
    with pytest.raises(StartupError, match=r"twice.yaml:5:1: .*server stands here and on line 1"):
        parse("--config", str(file))
    file.write_text("model: a\nserver: {port: 1, port: 2}\n")
    with pytest.raises(StartupError, match=r"twice.yaml:2:19: .*port stands here and on line 2"):
        parse("--config", str(file))
    file.write_text("base: &base {weight: 2}\ntenants:\n  acme: {<<: *base, weight: 3}\n")
    assert read_yaml(str(file))["tenants"] == {"acme": {"weight": 3}}


def test_broken_yaml(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("model: [unclosed")
    with pytest.raises(StartupError, match="not valid YAML"):
        parse("--config", str(file))
