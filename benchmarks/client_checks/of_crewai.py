"""Checks of CrewAI, which wants an older instructor than the newest."""

from __future__ import annotations

from client_checks.of_openai import Check, City


def crew(url: str, model: str) -> str:
    from crewai import LLM, Agent, Crew, Task

    llm = LLM(model=f"openai/{model}", base_url=f"{url}/v1", api_key="none", max_tokens=60, timeout=120)
    text = llm.call("Name a river.")
    guide = Agent(role="Guide", goal="Name cities.", backstory="A guide.", llm=llm, max_iter=2)
    task = Task(description="Name a city.", expected_output="A city.", agent=guide, output_pydantic=City)
    done = Crew(agents=[guide], tasks=[task], tracing=False).kickoff()
    assert text
    assert isinstance(done.pydantic, City)
    return f"{len(text)} characters; {done.pydantic!r}"


CHECKS: dict[str, Check] = {"crewai: `LLM.call`, `Crew.kickoff`": crew}
