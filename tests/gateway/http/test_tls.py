"""The server over TLS, with a certificate made here."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.cli.main import main
from penstock.core.errors import StartupError
from penstock.gateway.http import server
from penstock.gateway.http.tls import Certificate
from penstock.gateway.settings import ServerConfig, TlsConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving

_PEM, _PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()


def write_certificate(folder: Path, encryption: serialization.KeySerializationEncryption = _PLAIN) -> TlsConfig:
    """Of 127.0.0.1, signed by itself, each in place of the one before."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    for path, text in (
        (private, key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, encryption)),
        (cert, certificate.public_bytes(_PEM)),
    ):
        path.with_suffix(".new").write_bytes(text)
        os.replace(path.with_suffix(".new"), path)
    return TlsConfig(str(cert), str(private))


def settings_of(tls: TlsConfig) -> Settings:
    return Settings(server=ServerConfig(max_body_mib=0.25, tls=tls))


def url_of(gateway: Gateway) -> str:
    return f"https://{gateway.host}:{gateway.port}"


def test_requests_streams_and_refusals(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tls = write_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=tls.cert)
    with serving(tokenizer, settings_of(tls)) as gateway, httpx.Client(verify=trusted, timeout=20) as http:
        asked = {"model": MODEL, "prompt": "Hi", "stream": True}
        streamed = http.post(f"{url_of(gateway)}/v1/completions", json=asked).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there, friend!"
        for _ in range(2):  # the connection is closed after a body that is not read to its end
            refused = http.post(
                f"{url_of(gateway)}/v1/completions",
                content=b" " * 2**22,
                headers={"content-type": "application/json", "expect": "100-continue"},
            )
            assert refused.status_code == 413
        with httpx.Client(timeout=20) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.get(f"{url_of(gateway)}/health")
        with socket.create_connection((gateway.host, gateway.port), timeout=20) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            while plain.recv(4096):
                pass
        assert http.get(f"{url_of(gateway)}/health").status_code == 200


def test_commands_say_how_a_certificate_is_trusted(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = write_certificate(tmp_path)
    with serving(tokenizer, settings_of(tls)) as gateway:
        command = ["status", "--url", url_of(gateway)]
        assert main(command) == 1
        said = capsys.readouterr().err
        assert "CERTIFICATE_VERIFY_FAILED" in said
        assert "set SSL_CERT_FILE to that" in said
        assert "Is a server running there?" not in said
        monkeypatch.setenv("SSL_CERT_FILE", tls.cert)
        assert main(command) == 1
        assert "this needs an admin key" in capsys.readouterr().err


def test_a_new_certificate_is_used_without_a_restart(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.01)
    tls = write_certificate(tmp_path)
    with serving(tokenizer, settings_of(tls)) as gateway:
        address = gateway.host, gateway.port
        first = ssl.get_server_certificate(address, timeout=20)
        assert first.split() == Path(tls.cert).read_text().split()
        Path(tls.key).write_text("half a key")
        for _ in range(10):
            assert ssl.get_server_certificate(address, timeout=20) == first
        write_certificate(tmp_path)
        while ssl.get_server_certificate(address, timeout=20) == first:
            pass
        assert ssl.get_server_certificate(address, timeout=20).split() == Path(tls.cert).read_text().split()


def test_what_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    tls = write_certificate(tmp_path)
    for bad in (TlsConfig(str(tmp_path / "none.pem"), tls.key), TlsConfig(tls.cert, tls.cert)):
        with pytest.raises(StartupError, match="cannot use"):
            Certificate(bad)
    with pytest.raises(StartupError, match="cannot use"):
        Certificate(write_certificate(tmp_path, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(StartupError, match="key must be given"):
        TlsConfig(tls.cert)
