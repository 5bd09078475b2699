"""Several gateways on one store: a name means the same to all of them, and at once."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest, NotFound, Unavailable
from penstock.core.request import Adapter
from penstock.gateway.api.adapters import AdapterBase, Adapters, NamedAdapter
from penstock.gateway.tenancy.tenants import Tenant
from penstock.lora.checkpoint import adapter_digest
from penstock.state.memory import MemoryStore
from tests.lora.peft_folder import BASE, write_adapter

MODEL, NAMES, FOLDERS = "model", ("a", "b", "given", "fixed"), ("one", "two")
ROOT = Path(tempfile.mkdtemp())
DIGESTS = {name: adapter_digest(write_adapter(ROOT / name, BASE, seed)) for seed, name in enumerate(FOLDERS)}
STEP = st.tuples(
    st.sampled_from(("load", "unload")), st.integers(0, 1), st.sampled_from(NAMES), st.sampled_from(FOLDERS)
)


def gateway(store: MemoryStore) -> Adapters:
    one = Adapter(DIGESTS["one"], str(ROOT / "one"))
    at_start = [
        NamedAdapter(name="given", model=MODEL, adapter=one, loaded=0, source="folder"),
        NamedAdapter(name="fixed", model=MODEL, adapter=one, loaded=0, source="settings"),
    ]
    return Adapters(store, {MODEL: AdapterBase(lambda folder: None, ROOT, False)}, at_start, taken=[MODEL])


async def means(adapters: Adapters, name: str) -> str | None:
    await adapters.refresh()
    found = adapters.get(name)
    return None if found is None else found.adapter.digest


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=8))
def test_names_agree_whatever_happens_where(steps: list[tuple[str, int, str, str]]) -> None:
    async def run() -> None:
        store = MemoryStore()
        gateways = [gateway(store), gateway(store)]
        expected: dict[str, str] = dict.fromkeys(("given", "fixed"), DIGESTS["one"])
        for action, number, name, folder in steps:
            adapters = gateways[number]
            if name == "fixed":
                with pytest.raises(InvalidRequest, match="is in the settings"):
                    await (adapters.load(name, folder, None) if action == "load" else adapters.unload(name))
            elif action == "load":
                await adapters.load(name, folder, None)
                expected[name] = DIGESTS[folder]
            elif name in expected:
                await adapters.unload(name)
                del expected[name]
            else:
                with pytest.raises(NotFound):
                    await adapters.unload(name)
            for each in (*gateways, gateway(store)):  # one that starts now knows it, too
                assert {known: await means(each, known) for known in NAMES} == {n: expected.get(n) for n in NAMES}
                assert set(each.models(Tenant())) == expected.keys()

    asyncio.run(run())


async def test_without_the_store_what_is_known_stays() -> None:
    class Lost(MemoryStore):
        lost = False

        async def version(self) -> int:
            if self.lost:
                raise Unavailable("gone")
            return await super().version()

    store = Lost()
    adapters = gateway(store)
    await adapters.load("a", "two", None)
    store.lost = True
    assert await means(adapters, "a") == DIGESTS["two"]
    store.lost = False
    await gateway(store).load("a", "one", None)
    assert await means(adapters, "a") == DIGESTS["one"]


async def test_adapters_of_models_that_others_serve_are_not_served_here() -> None:
    store = MemoryStore()
    elsewhere = Adapters(store, {"other": AdapterBase(lambda folder: None, ROOT, False)})
    await elsewhere.load("a", "one", None)
    await elsewhere.load(MODEL, "one", None)
    assert await means(gateway(store), "a") is None
    assert await means(gateway(store), MODEL) is None
