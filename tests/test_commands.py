"""The command line itself: mistakes, completion, settings files, keys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.checkpoint import source
from penstock.cli import check
from penstock.cli.main import main
from penstock.settings import Settings, settings_from_mapping


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("serve --prot 9000", "penstock serve: error: unrecognized arguments: --prot (did you mean --port?)"),
        ("bench serve --concurency=8", "--concurency=8 (did you mean --concurrency?)"),
        ("serve --por 9000", "(did you mean --port?)"),  # no abbreviations: they would change their meaning
        ("sreve", "(did you mean serve?)"),
        ("keys lsit", "(did you mean list?)"),
        ("serve --gpu-memory-utilization=0.9", "--gpu-memory-utilization=0.9 (of vLLM; here: a model takes"),
        ("serve -tp 2", "-tp (of vLLM; here: no tensor parallelism;"),
        ("serve --max-num-seqs 8", "--max-num-seqs (of vLLM; here: use --max-seqs)"),
        ("serve --device cup", "(did you mean cpu?)"),
    ],
)
def test_mistyped_words_are_recognised(line: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(line.split())
    assert exit.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["bench serve --json", "chaos --html", "profile --output", "batch fetch x --output"]
)
def test_a_file_that_cannot_be_written_is_named_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, problem in ((tmp_path / "none" / "x", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(SystemExit) as exit:
            main([*command.split(), str(file)])
        assert exit.value.code == 2
        assert f"{file} " in (said := capsys.readouterr().err)
        assert problem in said


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["dashboards", "export", str(tmp_path / "file" / "below")]) == 1
    assert capsys.readouterr().err == f"penstock: {tmp_path}/file/below: Not a directory\n"


def complete(script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _penstock; echo "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "penstock", "ch") == ["chat", "check", "chaos"]
    assert complete(script, "penstock", "bench", "") == ["engine", "serve", "--help"]
    assert complete(script, "penstock", "bench", "serve", "--con") == ["--concurrency"]
    assert complete(script, "penstock", "serve", "--de") == ["--device"]
    assert complete(script, "penstock", "serve", "--device", "c") == ["cpu", "cuda"]
    assert complete(script, "penstock", "serve", "--config", "") == []  # then bash offers files
    assert complete(script, "penstock", "completion", "") == ["bash", "zsh", "fish", "--help"]


def test_every_shell_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
    assert scripts["zsh"].endswith(scripts["bash"])
    assert "-l quantization" in scripts["fish"]


def test_check_shows_what_a_file_comes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("engine: {max_seqs: 8}\nstate: redis://:secret@127.0.0.1/0\ntenants: {acme: {models: [a]}}\n")
    assert main(["check", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    again = settings_from_mapping(yaml.safe_load(shown))
    assert (again.engine.max_seqs, again.server) == (8, Settings().server)
    assert again.tenants["acme"].models == ("a",)


def test_what_check_shows_comes_to_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "missing_requirements", lambda settings, on: ())  # neither adapter nor secret is there
    file, again = tmp_path / "models.yaml", tmp_path / "again.yaml"
    file.write_text(f"""
models:
  small: {{model: smollm2-135m, replicas: 2, aliases: [default], engine: {{speculation: {{method: "off"}}}}}}
  wide: {{model: smollm2-135m, adapters: [{{name: legal, path: /legal}}], shadow: {{model: small}}}}
  "70": {{model: smollm2-135m, workers: ["tcp://gpu7:9000"], tool_parser: none}}
  cloud: {{model: smollm2-135m, upstreams: [{{url: "http://up:1", timeouts: {{check: 1}}}}]}}
  canary: {{versions: {{small: 9, wide: 1}}, aliases: ["claude-*"]}}
  cheap: {{cascade: {{small: small, large: wide, min_logprob: null}}}}
engine: {{max_seqs: 8, sampling_defaults: {{temperature: 0}}}}
autoscale: {{min_replicas: 0, max_replicas: 3}}
adapter_folder: {tmp_path}
classes: {{quick: {{ttft_ms: 300}}, slow: {{rank: 1}}}}
tenant_defaults: {{weight: 2, model_limits: {{small: {{tokens_per_minute: 9}}}}}}
tenants: {{acme: {{models: [small], model_limits: {{cloud: {{concurrent: 1}}}}}}, other: }}
prices: {{"70": {{input: 1}}}}
jwt: {{jwks_url: "https://issuer/keys", issuer: i, audience: a}}
cache: {{semantic: {{routes: [/v1/completions]}}}}
consume: {{url: "redis://broker:2/0"}}
""")
    assert main(["check", str(file)]) == 0
    again.write_text(shown := capsys.readouterr().out)
    assert main(["check", str(again)]) == 0
    assert capsys.readouterr().out == shown
    before, after = (settings_from_mapping(yaml.safe_load(each.read_text())) for each in (file, again))
    assert after == before


def test_check_shows_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a password has what ends one, and where a setting is of the wrong type."""
    file = tmp_path / "secrets.yaml"
    upstream = '{url: "http://up:1", headers: {authorization: "Bearer TOPSECRET"}}'
    good = f"""
state: "redis://:TOPSECRET/a@TOPSECRET@state:1/0"
consume: {{url: "redis://bob:TOPSECRET@broker:2/0"}}
observability: {{otlp_endpoint: "http://TOPSECRET@collector:3/v1"}}
jwt: {{jwks_url: "https://issuer/keys?p=policy&access_token=TOPSECRET", issuer: i, audience: a}}
models: {{a: {{model: smollm2-135m, upstreams: [{upstream}]}}}}
batches: {{folder: "sqlite:///srv/data@night"}}
"""
    file.write_text(good)
    assert main(["check", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "TOPSECRET" not in printed
    shown = yaml.safe_load(printed)
    assert shown["state"] == "redis://:…@state:1/0"
    assert shown["consume"]["url"] == "redis://bob:…@broker:2/0"
    assert shown["observability"]["otlp_endpoint"] == "http://…@collector:3/v1"
    assert shown["jwt"]["jwks_url"] == "https://issuer/keys?p=policy&access_token=…"
    assert shown["models"]["a"]["upstreams"][0]["headers"] == {"authorization": "…"}
    assert shown["batches"]["folder"] == f"{tmp_path}/sqlite:///srv/data@night"
    for wrong in (
        'state: ["redis://:TOPSECRET@state/0"]',
        f"models: {{a: {{upstreams: {upstream}}}}}",
        "models: {a: {upstreams: [{url: 'http://up:1', headers: [TOPSECRET]}]}}",
    ):
        file.write_text(wrong)
        assert main(["check", str(file)]) == 1
        assert "TOPSECRET" not in capsys.readouterr().err


def test_check_finds_every_error_and_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "engine:\n  max_sequences: 3\n  dtype: float8\n"
        "server: {port: 70000}\ntenants:\n  a.b: {weigth: 2}\nstat: memory\n"
    )
    monkeypatch.setenv("PENSTOCK_SERVER__HOST", "")
    monkeypatch.setenv("PENSTOCK_CACHE__MEMORY_MIB", "lots")
    assert main(["check", str(file)]) == 1
    captured = capsys.readouterr()
    errors = dict(line.split(": ", 1) for line in captured.err.splitlines())
    assert captured.out == ""
    assert set(errors) == {*(f"{file}:{line}" for line in (2, 3, 4, 6, 7)), "PENSTOCK_CACHE__MEMORY_MIB"}
    assert errors[f"{file}:2"].startswith("engine.max_sequences is not a setting (did you mean max_seqs?)")
    assert errors[f"{file}:4"].startswith("server.port must be between")
    assert errors[f"{file}:6"].startswith("tenants.a.b.weigth is not a setting (did you mean weight?)")
    assert errors["PENSTOCK_CACHE__MEMORY_MIB"] == "cache.memory_mib must be a number, not 'lots'"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("consume: {requests: q}\n", ":1: consume.url must be given"),
        ('consume: {url: "http://x"}\n', ":1: consume.url must begin with redis://"),
        ("models:\n  a: {model: m, upstreams: [{model: x}]}\n", ":2: models.a.upstreams.0.url must be given"),
    ],
)
def test_what_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text + "stat: memory\n")
    assert main(["check", str(file)]) == 1
    unknown, *others = sorted(capsys.readouterr().err.splitlines(), key=lambda line: "stat is" not in line)
    assert "stat is not a setting" in unknown
    assert len(others) == 1
    assert others[0].startswith(f"{file}{error}")
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"{file}{error}")


UPSTREAM = "models:\n  a:\n    model: smollm2-135m\n    upstreams: [{url: 'http://u', api_key_env: NOT_SET_HERE}]\n"
ADAPTER = "models:\n  a:\n    model: smollm2-135m\n    adapters:\n    - {name: x, path: /nowhere}\n"
SHARED = "models: {a: {model: smollm2-135m}, b: {model: smollm2-135m}}\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("models:\n  a: {model: m}\n  b:\n    aliases: [a]\n", ":4: models.b.aliases has 'a', which names"),
        ("model: smollm2-135m\nmodels:\n  a: {model: m}\n", ":1: model must not be given beside models"),
        ("\nserver:\n  tls: {cert: /nowhere, key: /nowhere}\n", ":3: cannot use /nowhere with /nowhere: "),
        ("jwt:\n  issuer: i\n  audience: a\n  key_file: /nowhere\n", ":4: jwt.key_file /nowhere: "),
        ("cache: {}\nmodel: ./nope\n", ":2: no model found for 'FOLDER/nope'; "),
        ("models:\n  a: {}\n", ":2: model a: no model found for 'a'; "),
        ("models:\n  b: {model: dummy:nope}\n", ":2: model b: dummy: needs a folder with config.json"),
        ("\nadapter_folder: ./nope\n", ":2: adapter_folder FOLDER/nope is not a folder"),
        (f"adapter_folder: nope\n{SHARED}", ":1: adapter_folder FOLDER/nope is not a folder"),
        (ADAPTER, ":4: adapter x of a: cannot read /nowhere/adapter_config.json: "),
        ("cache:\n  shared_prefixes: ['@/nope']\n", ":2: cache.shared_prefixes: cannot read /nope: "),
        (f"autoscale:\n  policy: nope.mod:fn\n{SHARED}", ":2: policy nope.mod:fn cannot be imported: "),
        (UPSTREAM, ":4: models.a.upstreams.0.api_key_env: the environment variable NOT_SET_HERE is not set"),
        ("models: {a: {model: smollm2-135m, workers: ['tcp://w:1']}}\n", ":1: workers on other machines need a secret"),
        ("engine:\n  max_model_len: 8193\n", ":2: max_model_len is 8193, but the model was made for at most 8192 "),
        (
            "engine: {max_model_len: 9000}\nmodels: {a: {model: smollm2-135m}}\n",
            ":1: model a: max_model_len is 9000, but the model was ",
        ),
        ("models:\n  smollm2-135m:\n    engine: {max_model_len: 9000}\n", ":3: model smollm2-135m: max_model_len is "),
        ("batches:\n  folder: ./bad.yaml/x\n", ":2: cannot keep files in FOLDER/bad.yaml/x: "),
        ("state: memory\nserver:\n  host: 0.0.0.0\n", ":3: server.host is 0.0.0.0, which others can reach"),
        ("server:\n  host: 0.0.0.0\n", ":2: server.host is 0.0.0.0, which others can reach"),
    ],
)
def test_check_finds_what_serve_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_WORKER_SECRET", raising=False)
    for command in (["check", str(file)], ["serve", "--config", str(file)]):
        assert main(command) == 1
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count(f"{file}:")) == ("", 1)
        assert captured.err.startswith(f"{file}{error.replace('FOLDER', str(tmp_path))}")


def test_check_leaves_no_folder_for_batches(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/one"):
        file = tmp_path / "settings.yaml"
        file.write_text(f"batches: {{folder: ./{folder}}}\n")
        assert main(["check", str(file)]) == 0
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["settings.yaml", "there"]


def test_check_reports_all_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("adapter_folder: nope\nmodel: ./nope\nserver: {host: '::'}\nstate: memory\n")
    assert main(["check", str(file)]) == 1
    said = capsys.readouterr().err
    assert all(f"{file}:{line}: " in said for line in (1, 2, 3))


def test_check_without_a_file_shows_the_defaults_on_any_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BUILT_IN_PACKAGE", "not_installed_here")
    assert main(["check"]) == 0
    assert settings_from_mapping(yaml.safe_load(capsys.readouterr().out)).engine == Settings().engine
    file = tmp_path / "settings.yaml"
    file.write_text("server: {port: 9000}\n")
    assert main(["check", str(file)]) == 1
    assert "the built-in model is not installed; run: pip" in capsys.readouterr().err


def test_check_knows_tenants_of_the_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "public.yaml"
    file.write_text("server: {host: 0.0.0.0}\n")
    assert main(["check", str(file)]) == 1
    assert list(tmp_path.iterdir()) == [file], "looking makes no store"
    assert main(["keys", "create", "--admin"]) == 0
    assert main(["check", str(file)]) == 1
    assert main(["keys", "create", "acme"]) == 0
    assert main(["check", str(file)]) == 0


def test_a_variable_or_a_flag_that_is_wrong_is_not_blamed_on_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("server: {port: 9000}\n")
    monkeypatch.setenv("PENSTOCK_SERVER__PORT", "abc")
    for config in (["--config", str(file)], []):
        assert main(["serve", *config]) == 1
        assert capsys.readouterr().err == "PENSTOCK_SERVER__PORT: server.port must be a whole number, not 'abc'\n"
        assert main(["serve", *config, "--port", "70000"]) == 1
        assert capsys.readouterr().err.startswith("penstock: server.port must be between")


@pytest.mark.parametrize("command", [["serve"], ["worker", "--listen", "127.0.0.1:0"], ["keys", "list"]])
@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("model: m\nserver: {host: 1}\n", ":2", "server.host must be text, not 1"),
        ("engine:\n  speculation:\n    max_tokens: 1.5\n", ":3", "max_tokens must be a whole number, not 1.5"),
        ("model: [\n", ":2:1", "not valid YAML: expected the node content"),
    ],
)
def test_commands_say_where_a_setting_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], text: str, line: str, problem: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert main([*command, "--config", str(file)]) == 1
    said = capsys.readouterr().err
    assert f"{file}{line}: " in said
    assert problem in said
    assert len(said.splitlines()) == 1


def test_a_variable_without_its_section_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "9000")
    assert main(["check"]) == 0
    assert "did you mean PENSTOCK_SERVER__PORT?" in capsys.readouterr().err


def test_a_key_that_cannot_be_kept_is_not_printed(tmp_path: Path) -> None:
    """The state folder would have to be inside a file, which not even root can have."""
    (tmp_path / "file").touch()
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-m", "penstock.cli.main", "keys", "create", "acme"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    for words in (str(tmp_path / "file"), "--state sqlite:///PATH", "XDG_STATE_HOME"):
        assert words in done.stderr
    assert "psk-" not in done.stderr
    kept = subprocess.run([*command, "--state", f"sqlite:///{tmp_path}/keys.db"], env=env, capture_output=True)
    assert kept.stdout.startswith(b"psk-")


def test_keys_say_how_they_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--state", f"sqlite:///{tmp_path}/keys.db"]
    assert main(["keys", "list", *store]) == 0
    assert "no keys yet. 'penstock keys create NAME'" in capsys.readouterr().err
    assert main(["keys", "create", "acme", *store]) == 0
    created = capsys.readouterr()
    key = created.out.strip()
    assert "export PENSTOCK_API_KEY=KEY" in created.err, "the key itself is piped away and must not be in a log"
    assert key not in created.err
    assert 'curl http://127.0.0.1:8000/v1/models -H "Authorization: Bearer $PENSTOCK_API_KEY"' in created.err
    assert main(["keys", "list", *store]) == 0
    assert "acme" in capsys.readouterr().out


def test_help_of_every_command_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "check", "completion", "explain", "chaos"):
        with pytest.raises(SystemExit) as exit:
            main([command, "--help"])
        assert exit.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: penstock {command}")


@pytest.mark.parametrize("module", ["penstock.core.errors", "penstock.core.request", "penstock.settings", "ssl"])
def test_ctrl_c_is_quiet_from_the_first_import_on(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
interrupted = []
def hook(event, args):
    if event == "import" and args[0] == {module!r} and not interrupted:
        interrupted.append(True)
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
""")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "penstock.cli.main", "status"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_paths_in_a_file_begin_at_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    for folder in (place, elsewhere, place / "llama", place / "smollm2-135m"):
        folder.mkdir()
    (place / "settings.yaml").write_text("""
models:
  one: {model: ./tuned, adapters: [{name: legal, path: legal}], engine: {speculation: {method: draft, model: llama}}}
  two: {model: llama, adapter_folder: ../adapters}
  three: {model: "dummy:llama", adapter_folder: /adapters}
  four: {model: tiny.gguf, aliases: [llama/llama]}
  hub: {model: meta/llama}
  built_in: {model: smollm2-135m, adapter_folder: "~/adapters"}
state: sqlite:///state.db
batches: {folder: batches}
cache: {disk_path: answers.sqlite, shared_prefixes: ["@prompts/shop.txt", "You are llama"]}
""")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(check, "missing_requirements", lambda settings, on: ())  # hardly any of these paths is there
    monkeypatch.setenv("PENSTOCK_ADAPTER_FOLDER", "adapters")  # what is no setting of the file begins where one is
    assert main(["check", "../place/settings.yaml"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    models, at = shown["models"], str(place)
    assert {name: model["model"] for name, model in models.items()} == {
        "one": f"{at}/tuned",
        "two": f"{at}/llama",
        "three": f"dummy:{at}/llama",
        "four": f"{at}/tiny.gguf",
        "hub": "meta/llama",
        "built_in": "smollm2-135m",
    }
    assert models["one"]["adapters"][0]["path"] == f"{at}/legal"
    assert models["one"]["engine"]["speculation"]["model"] == f"{at}/llama"
    assert models["four"]["aliases"] == ["llama/llama"]
    assert [models[name]["adapter_folder"] for name in ("one", "two", "three", "built_in")] == [
        "adapters",
        f"{at}/../adapters",
        "/adapters",
        "~/adapters",
    ]
    assert (shown["state"], shown["batches"]["folder"]) == (f"sqlite:///{at}/state.db", f"{at}/batches")
    assert shown["cache"]["disk_path"] == f"{at}/answers.sqlite"
    assert shown["cache"]["shared_prefixes"] == [f"@{at}/prompts/shop.txt", "You are llama"]


NO_UNICODE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def command(*arguments: str, shell: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    line = [sys.executable, "-m", "penstock.cli.main", *arguments]
    if shell:
        line = ["bash", "-c", f'"$@" {shell}', "bash", *line]
    return subprocess.run(line, capture_output=True, timeout=60, env={**os.environ, **variables})


def test_files_are_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("# Größe\nserver: {served_model_name: größe}\n", encoding="utf-8")
    found = command("check", str(tmp_path / "settings.yaml"), **NO_UNICODE)
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"served_model_name: gr" in found.stdout
    assert command("dashboards", "export", str(tmp_path), **NO_UNICODE).returncode == 0
    assert "°C" in (tmp_path / "penstock-rules.yaml").read_text(encoding="utf-8")


def test_closed_output_is_no_error(tmp_path: Path) -> None:
    found = command("status", "--url", "http://127.0.0.1:9", shell=">&-")
    assert (found.returncode, found.stderr.splitlines()[0][:40]) == (1, b"penstock: cannot connect to http://127.0")


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "tenants: &t {acme: *t}\n", "a: " + "[" * 3000 + "]" * 3000])
def test_yaml_without_an_end_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    assert main(["check", str(tmp_path / "settings.yaml")]) == 1
    assert "nested too deeply, or an alias in it holds itself" in capsys.readouterr().err


def test_keys_end_at_their_last_letter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "a\nb")
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "the API key holds a line break" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_API_KEY", "ab\n")
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot connect" in capsys.readouterr().err


def test_notes_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state", f"sqlite:///{tmp_path}/state.db"]
    assert main(["keys", "create", "acme", "--note", "one\ntwo\x1b[31m", *state]) == 0
    capsys.readouterr()
    assert main(["keys", "list", *state]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("onetwo[31m")


def test_a_variable_of_clients_is_no_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", "http://127.0.0.1:9")
    (tmp_path / "settings.yaml").write_text("\nurl: http://other\n")
    assert main(["check", str(tmp_path / "settings.yaml")]) == 1
    assert f"{tmp_path}/settings.yaml:2" in capsys.readouterr().err
