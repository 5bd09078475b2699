"""Claude Code itself, where it is installed, before an engine that follows a script: it asks, calls a tool, sends the
result back and shows the answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.request import GenerateRequest
from penstock.fleet.settings import ModelConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, Action, says
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import serving

CLAUDE = shutil.which("claude")
CALLS = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls", "description": "List files"}}\n</tool_call>'
ANSWERS = "The folder holds note.txt."


@pytest.mark.skipif(CLAUDE is None, reason="needs Claude Code: npm install -g @anthropic-ai/claude-code")
def test_a_question_that_takes_a_tool(tokenizer: Tokenizer, tmp_path: Path) -> None:
    calls, answers = says(tokenizer, CALLS, ANSWERS)
    folder, home = tmp_path / "work", tmp_path / "home"
    for each in (folder, home):
        each.mkdir()
    (folder / "note.txt").write_text("hello")

    def script(request: GenerateRequest) -> list[Action]:
        listed = "note.txt" in tokenizer.decode(request.prompt[-400:])
        return [[token] for token in (answers if listed else calls)]

    aliases = Settings(models={MODEL: ModelConfig(aliases=("claude-*",))})
    with serving(tokenizer, aliases, names=[MODEL, "claude-*"]) as gateway:
        gateway.engine.info = replace(gateway.engine.info, max_model_len=65_536)  # its prompt has 20,000 tokens
        gateway.engine.script = script
        environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "ANTHROPIC_BASE_URL": gateway.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        asked = [
            str(CLAUDE),
            "-p",
            "--allowedTools",
            "Bash(ls:*)",
            "--output-format",
            "json",
            "What is in this folder?",
        ]
        ran = subprocess.run(asked, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    outcome = json.loads(ran.stdout)
    assert not outcome["is_error"], outcome
    assert outcome["result"] == ANSWERS
    assert outcome["num_turns"] == 2
