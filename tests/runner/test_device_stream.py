"""The stream of a GPU's steps, as far as it can be tested without one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.runner.device_stream import DeviceStream


def test_every_thread_has_the_context_before_it_uses_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    def default_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: entered.append(threading.get_ident()))

    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    stream = DeviceStream.__new__(DeviceStream)
    stream.device, stream._thread = torch.device("cuda"), None
    stream.enter()
    stream.enter()
    other = threading.Thread(target=stream.enter)
    other.start()
    other.join()
    stream.enter()
    here = threading.get_ident()
    assert entered == [here, other.ident, here]
