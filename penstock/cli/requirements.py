"""Checks that the packages and files which the settings need are there, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from penstock.core.errors import StartupError
from penstock.settings import Settings

_ANY_HOST = ("0.0.0.0", "::")
_GATEWAY = ("httptools", "jinja2", "msgspec", "prometheus_client", "python_multipart", "tokenizers", "websockets")


def check_requirements(settings: Settings, on: str) -> None:
    """Raise StartupError for what is missing. Nothing is imported that is not needed anyway: a start should be fast."""
    for who, module, extra in _modules(settings, on):
        if not _is_installed(module):
            raise StartupError(f"{who} needs {module}, which is not installed; pip install 'penstock[{extra}]'")
    if on == "ray" and settings.ray.gateways > 1:
        _check_gateways(settings)
    if settings.server.tls is not None:
        from penstock.gateway.http.tls import Certificate

        Certificate(settings.server.tls)
    if settings.jwt is not None:
        from penstock.gateway.tenancy.web_tokens import TokenVerifier

        TokenVerifier(settings.jwt)
    if settings.cache.enabled and settings.cache.semantic.routes:
        from penstock.cache.encoder import encoder_folder

        encoder_folder(settings.cache.semantic.encoder)


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
