"""A server whose model is on the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

import openai
import pytest

from penstock.checkpoint.source import BUILT_IN_ENCODER, resolve
from penstock.kernels.native import bindings
from tests.conftest import start_server
from tests.hub_server import hub_of


@pytest.mark.skipif(not bindings.available(), reason=str(bindings.unavailable_reason()))
def test_a_model_of_the_hub_is_served(tmp_path: Path) -> None:
    """The gateway takes the tokenizer, the worker the weights as well, and each file comes once."""
    with hub_of("org/minilm", resolve(BUILT_IN_ENCODER).path) as hub:
        env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        server = start_server("org/minilm", environ={**os.environ, **env})
        try:
            client = openai.OpenAI(base_url=server.base_url, api_key="none")
            found = client.embeddings.create(model="org/minilm", input="Rain falls on the roof.")
            assert len(found.data[0].embedding) == 384
        finally:
            server.stop()
    assert "model.safetensors" in hub.downloaded
    assert len(hub.downloaded) == len(set(hub.downloaded))
    assert not [line for line in server.log if "HTTP Request" in line or "Fetching" in line]
