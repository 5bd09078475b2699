"""OpenVINO GenAI with continuous batching: run by the Python of its environment with an exported model as argument."""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import openvino_genai
from inprocess import Generate, Timeline, serve

CACHE_GB = 2


def load() -> Generate:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(Path(sys.argv[1]), scheduler, "CPU")
    tokenizer = pipeline.get_tokenizer()
    next_id = 0

    def submit(prompt: str, output_len: int) -> tuple[Any, Timeline]:
        nonlocal next_id
        next_id += 1
        sent = time.perf_counter()
        ids = tokenizer.encode(prompt).input_ids
        config = openvino_genai.GenerationConfig(
            max_new_tokens=output_len, min_new_tokens=output_len, ignore_eos=True, do_sample=False
        )
        return pipeline.add_request(next_id, ids, config), Timeline(sent, ids.get_size())

    def generate(prompts: list[str], output_lens: list[int], clients: int) -> list[Timeline]:
        todo = iter(zip(prompts, output_lens, strict=True))
        running = [submit(*job) for job in islice(todo, clients)]
        done: list[Timeline] = []
        while running:
            pipeline.step()
            going = []
            for handle, timeline in running:
                while handle.can_read():
                    timeline.output_tokens += sum(len(output.generated_ids) for output in handle.read().values())
                    timeline.token_times.append(time.perf_counter())
                if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                    going.append((handle, timeline))
                    continue
                timeline.finished = time.perf_counter()
                done.append(timeline)
                if job := next(todo, None):
                    going.append(submit(*job))
            running = going
        return done

    return generate


if __name__ == "__main__":
    serve(load)
