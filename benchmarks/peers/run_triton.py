"""A Triton server with the built-in model behind its generate endpoints: run by the Python of the triton environment.

PyTriton brings the server. The model inside it is this checkout's engine as a library, since any other would need
another download; to whoever asks it is a decoupled model with tensors of text.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from pytriton.model_config import ModelConfig, Tensor  # type: ignore[import-not-found]
from pytriton.triton import Triton, TritonConfig  # type: ignore[import-not-found]

from penstock import LLM, SamplingParams
from penstock.core.request import Chunk, GenerateRequest
from penstock.text.stream import TextStream

MODEL = "story"


class Generator:
    def __init__(self, path: str) -> None:
        self._llm = LLM(path)
        self._requests = 0

    def __call__(self, requests: list[Any]) -> Iterator[list[dict[str, np.ndarray[Any, Any]]]]:
        [request] = requests
        values = {name: tensor.reshape(-1)[0] for name, tensor in request.data.items()}
        params = SamplingParams(
            max_tokens=int(values["max_tokens"]),
            temperature=float(values.get("temperature", 1.0)),
            seed=int(values.get("seed", 0)),
        )
        for text in self._texts(values["text_input"].decode(), params):
            yield [{"text_output": np.array([text.encode()])}]

    def _texts(self, prompt: str, params: SamplingParams) -> Iterator[str]:
        self._requests += 1
        inbox: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        ids = self._llm.tokenizer.encode(prompt)
        request = GenerateRequest(str(self._requests), ids, params, seed=params.seed or 0)
        stream = TextStream(self._llm.tokenizer, params)
        self._llm.engine.start(request, inbox.put)
        try:
            while stream.finish_reason is None:
                yield stream.push(inbox.get()).text
        finally:
            self._llm.engine.abort(request.id)


def main() -> None:
    path, port = sys.argv[1:]
    text = {"dtype": bytes, "shape": (1,)}
    inputs = [
        Tensor(name="text_input", **text),
        Tensor(name="max_tokens", dtype=np.int32, shape=(1,)),
        Tensor(name="temperature", dtype=np.float32, shape=(1,), optional=True),
        Tensor(name="seed", dtype=np.int64, shape=(1,), optional=True),
    ]
    config = TritonConfig(http_port=int(port), http_address="127.0.0.1", allow_grpc=False, allow_metrics=False)
    with Triton(config=config) as triton:
        triton.bind(
            model_name=MODEL,
            infer_func=Generator(path),
            inputs=inputs,
            outputs=[Tensor(name="text_output", **text)],
            config=ModelConfig(batching=False, decoupled=True),
            strict=False,
        )
        triton.serve()


if __name__ == "__main__":
    main()
