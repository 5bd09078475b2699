"""The server's certificate for TLS, read again when its files change."""

from __future__ import annotations

import logging
import os
import ssl

from penstock.core.errors import StartupError
from penstock.gateway.settings import TlsConfig
from penstock.observability.logging import log

logger = logging.getLogger("penstock.gateway")


class Certificate:
    """`context` is for the connections to come: each handshake uses what was read last."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._read_at = self._changed_at()
        try:
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"cannot use {config.cert} with {config.key}: {error}", param="server.tls") from error

    def reload_if_changed(self) -> None:
        """New files that do not fit together, or are half written, change nothing; they are looked at again."""
        changed_at = self._changed_at()
        if changed_at == self._read_at:
            return
        try:
            self._read()  # a mismatch in the context that is used would leave it without a key
            self.context.load_cert_chain(self._config.cert, self._config.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            log(logger, logging.WARNING, "certificate not read again", cert=self._config.cert, why=str(error))
            return
        self._read_at = changed_at
        log(logger, logging.INFO, "certificate read again", cert=self._config.cert)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._config.cert, self._config.key, password=_no_password)
        return context

    def _changed_at(self) -> tuple[int, ...]:
        """0 for a file that is not there: a certificate that is being replaced is no reason to stop."""
        found = []
        for path in (self._config.cert, self._config.key):
            try:
                found.append(os.stat(path).st_mtime_ns)
            except OSError:
                found.append(0)
        return tuple(found)


def _no_password() -> str:
    """For a key that needs one: an error, where OpenSSL would ask at the terminal."""
    return ""
