"""Transformers with static batches: run by the Python of its environment with a model folder and a dtype."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from inprocess import Generate, Timeline, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Stops nothing; it is called after every token of the batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load() -> Generate:
    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, sys.argv[2]))

    def one_batch(prompts: list[str], output_len: int) -> list[Timeline]:
        sent, clock = time.perf_counter(), Clock()
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            model.generate(
                **inputs,
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                stopping_criteria=StoppingCriteriaList([clock]),
                pad_token_id=tokenizer.pad_token_id,
            )
        counts = inputs["attention_mask"].sum(dim=1).tolist()
        return [Timeline(sent, count, len(clock.times), clock.times, clock.times[-1]) for count in counts]

    def generate(prompts: list[str], output_lens: list[int], clients: int) -> list[Timeline]:
        timelines = []
        for start in range(0, len(prompts), clients):
            batch = slice(start, start + clients)
            timelines += one_batch(prompts[batch], max(output_lens[batch]))
        return timelines

    return generate


if __name__ == "__main__":
    serve(load)
