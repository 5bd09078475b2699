"""An OTLP collector for tests: keeps the spans that it receives."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.arrived = threading.Condition()
        collector = self

        class Receive(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                export = ExportTraceServiceRequest.FromString(body)
                with collector.arrived:
                    for resource in export.resource_spans:
                        for scope in resource.scope_spans:
                            collector.spans.extend(scope.spans)
                    collector.arrived.notify_all()
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def trace(self, trace_id: bytes) -> dict[str, list[Any]]:
        """All spans of a trace by name, once its outermost, which ends last, is there."""

        def found() -> list[Any]:
            return [span for span in self.spans if span.trace_id == trace_id]

        with self.arrived:
            assert self.arrived.wait_for(lambda: any(span.kind == 2 for span in found()), 20)
            spans = found()
        return {name: [span for span in spans if span.name == name] for name in {span.name for span in spans}}

    def stop(self) -> None:
        self.server.shutdown()
