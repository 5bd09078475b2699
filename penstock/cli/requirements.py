"""Checks that what the settings need is there, before a model is loaded: packages, files, variables and tenants.

`penstock check` reports all that is missing, `penstock serve` ends with the first of it. What only a network could tell
is left to the start: models on the hub, upstreams, brokers, and tenants in a Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from penstock.checkpoint.source import is_on_hub, resolve
from penstock.core.errors import InvalidRequest, StartupError
from penstock.fleet.settings import ModelConfig
from penstock.settings import Settings

_ANY_HOST = ("0.0.0.0", "::")
_GATEWAY = ("httptools", "jinja2", "msgspec", "prometheus_client", "python_multipart", "tokenizers", "websockets")


def check_requirements(settings: Settings, on: str) -> None:
    """Raise StartupError for what is missing first."""
    for error in missing_requirements(settings, on):
        raise error


def missing_requirements(settings: Settings, on: str) -> Iterator[StartupError]:
    """Nothing is imported that is not needed anyway: a start should be fast."""
    absent = [each for each in _modules(settings, on) if not _is_installed(each[1])]
    for who, module, extra in absent:
        yield StartupError(f"{who} needs {module}, which is not installed; pip install 'penstock[{extra}]'")
    told: set[str] = set()
    for check in _checks(settings, on) if not absent else ():
        try:
            check()
        except StartupError as error:
            if error.message not in told:  # once for all models that share a setting
                told.add(error.message)
                yield error


def _checks(settings: Settings, on: str) -> Iterator[Callable[[], None]]:
    if on == "ray" and settings.ray.gateways > 1:
        yield partial(_check_gateways, settings)
    yield partial(_check_files, settings)
    yield partial(_check_tenants, settings)
    for name, config in settings.served.items():
        where = f"models.{name}." if settings.models else ""
        yield partial(_check_model, name, where, config, settings, on)
        yield partial(_check_adapters, name, where, config, settings)
        yield partial(_check_policy, where, config, settings)
        yield partial(_check_secrets, where, config)


def _check_files(settings: Settings) -> None:
    if settings.server.tls is not None:
        from penstock.gateway.http.tls import Certificate

        Certificate(settings.server.tls)
    if settings.jwt is not None:
        from penstock.gateway.tenancy.web_tokens import TokenVerifier

        TokenVerifier(settings.jwt)
    if settings.cache.enabled and settings.cache.semantic.routes:
        from penstock.cache.encoder import encoder_folder

        encoder_folder(settings.cache.semantic.encoder)
    if settings.cache.shared_prefixes:
        from penstock.gateway.tenancy.prefixes import prefix_text

        for entry in settings.cache.shared_prefixes:
            prefix_text(entry)
    from penstock.batches.place import check_batches_folder

    check_batches_folder(settings.batches, settings.state)


def _check_tenants(settings: Settings) -> None:
    """On a host that others can reach. Those in a Redis are left to the start."""
    from penstock.gateway.tenancy.tenants import KIND, check_host
    from penstock.state.open import is_shared, sqlite_file
    from penstock.state.sqlite import may_have_records

    if not settings.tenants and not is_shared(settings.state):
        file = sqlite_file(settings.state)
        check_host(settings.server, some_tenant=file is not None and may_have_records(file, KIND))


def _check_model(name: str, where: str, config: ModelConfig, settings: Settings, on: str) -> None:
    model, wanted = config.model or name, config.engine.max_model_len
    if is_on_hub(model):
        return
    prefix, here = f"model {name}: " if where else "", bool(config.local_replicas)
    try:
        checkpoint = resolve(model, weights=here and on == "local")
    except StartupError as error:
        raise StartupError(f"{prefix}{error.message}", param=f"{where}model") from error
    if not here or wanted is None:
        return
    from penstock.models.context_length import longest_context, max_model_len

    try:
        max_model_len(wanted, longest_context(checkpoint))
    except StartupError as error:
        setting = error.param and f"{'' if settings.engine.max_model_len == wanted else where}{error.param}"
        raise StartupError(f"{prefix}{error.message}", param=setting or f"{where}model") from error


def _check_adapters(name: str, where: str, config: ModelConfig, settings: Settings) -> None:
    """Whether they fit the model is left to the start, which reads the model."""
    from penstock.gateway.api.adapters import check_adapter_folder, not_an_adapter
    from penstock.lora.checkpoint import summarize_adapter

    if config.adapter_folder is not None:
        common = config.adapter_folder == settings.adapter_folder
        check_adapter_folder(Path(config.adapter_folder).expanduser(), "" if common else where)
    for number, adapter in enumerate(config.adapters):
        try:
            summarize_adapter(Path(adapter.path).expanduser().resolve())
        except InvalidRequest as error:
            raise not_an_adapter(adapter, name, error, f"{where}adapters.{number}.path") from None


def _check_policy(where: str, config: ModelConfig, settings: Settings) -> None:
    if config.autoscale is None:
        return
    from penstock.autoscaling.policies import policy_named

    common = settings.autoscale is not None and settings.autoscale.policy == config.autoscale.policy
    try:
        policy_named(config.autoscale.policy)
    except StartupError as error:
        setting = f"{'' if common else where}autoscale.policy"
        raise StartupError(error.message, param=setting) from error


def _check_secrets(where: str, config: ModelConfig) -> None:
    """Variables of the environment that have the keys of others."""
    if config.workers:
        from penstock.fleet.build import worker_secret

        try:
            worker_secret()
        except StartupError as error:
            raise StartupError(error.message, param=f"{where}workers") from error
    for number, upstream in enumerate(config.upstreams):
        try:
            upstream.api_key()
        except StartupError as error:
            setting = f"{where}upstreams.{number}.api_key_env"
            raise StartupError(f"{setting}: {error.message}", param=setting) from error


def _check_gateways(settings: Settings) -> None:
    """Of several gateways on nodes of a Ray cluster."""
    count, state, host = settings.ray.gateways, settings.state, settings.server.host
    if state is None or not state.startswith("redis"):
        raise StartupError(
            f"ray.gateways is {count}, and gateways on several nodes share keys, limits and spend through a Redis: "
            "set state to redis://HOST:PORT/DB, which all nodes reach, or leave ray.gateways at 1",
            param="state",
        )
    if host not in _ANY_HOST:
        raise StartupError(
            f"ray.gateways is {count}, and each gateway listens on its own node: set server.host to 0.0.0.0 or ::, not "
            f"{host}",
            param="server.host",
        )


def _modules(settings: Settings, on: str) -> Iterator[tuple[str, str, str]]:
    from penstock.observability.tracing import is_wanted

    yield from (("penstock serve", module, "serve") for module in _GATEWAY)
    if on == "ray":
        yield "--on ray", "ray", "ray"
    if settings.state is not None and settings.state.startswith(("redis", "unix")):
        yield "state", "redis", "serve"
    if settings.consume is not None:
        module = {"redis": "redis", "rabbitmq": "aio_pika", "kafka": "confluent_kafka"}[settings.consume.kind]
        yield "consume", module, "serve" if module == "redis" else settings.consume.kind
    if settings.jwt is not None:
        yield "jwt", "jwt", "serve"
    if is_wanted(settings.observability.otlp_endpoint):
        yield "otlp_endpoint", "opentelemetry.sdk", "otel"
        yield "otlp_endpoint", "opentelemetry.exporter.otlp.proto.http", "otel"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
