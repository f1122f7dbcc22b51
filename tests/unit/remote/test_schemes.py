"""What sets a store apart stands in one table, which all ask that have to do with addresses."""

import ast

import pytest
from places import ROOT

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.store import STORES, open_place, open_store
from tokenfeed.pipeline.remote.address import SCHEMES
from tokenfeed.pipeline.remote.object_store import ObjectStore

pytest.importorskip("obstore")
OF_AWS_ALONE = {"client.py": {"s3"}}
"""Profiles and endpoints, which no other store has."""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_opened_and_written_to_unless_it_is_the_webs(scheme: str) -> None:
    url = f"{scheme}://somewhere/out"
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    assert store.address.traits is SCHEMES[scheme]
    if SCHEMES[scheme].is_web:
        with pytest.raises(ConfigError, match=f"^{url}: nothing can be written there"):
            open_place(url)
    else:
        assert open_place(url) == store


def test_a_scheme_that_the_client_knows_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES, "s3a", ObjectStore.from_url)
    assert open_store("s3a://somewhere/out").name == "s3a://somewhere/out"


@pytest.mark.parametrize("layer", ["pipeline", "tools", "trainer"])
def test_no_other_file_names_a_scheme(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
        said = {str(value).removesuffix("://") for value in constants} & SCHEMES.keys()
        assert path.name == "address.py" or said <= OF_AWS_ALONE.get(path.name, set()), path
