from collections.abc import Callable
from typing import Any

import orjson
import pytest

from gateway.core.settings import ModelSpec
from gateway.watch.catalog import Catalog, parse_models, permits


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, "owned_by": "vllm", **more}


def catalog(*models: ModelSpec, fixed: tuple[str, ...] = ()) -> Catalog:
    made = Catalog(lambda: 99.5)
    made.configure(models, fixed)
    return made


def ids(body: bytes) -> list[str]:
    return [model["id"] for model in orjson.loads(body)["data"]]


def test_fields_of_the_backend_are_kept() -> None:
    found = catalog(ModelSpec("m", ("a",)))
    found.put("a", [entry("m", root="org/m", parent=None, max_model_len=8192)])

    assert orjson.loads(found.body()) == {
        "object": "list",
        "data": [entry("m", root="org/m", parent=None, max_model_len=8192)],
    }


def test_aliases_are_shown_with_the_fields_of_their_model() -> None:
    found = catalog(ModelSpec("m", ("a",), aliases=("coder",)))
    found.put("a", [entry("m", max_model_len=8192)])

    assert orjson.loads(found.body())["data"][1] == entry("coder", max_model_len=8192)


def test_what_cannot_be_routed_is_not_listed() -> None:
    found = catalog(ModelSpec("m", ("a",)))
    found.put("a", [entry("m"), entry("internal-name")])

    assert ids(found.body()) == ["m"]


def test_lora_of_one_backend_is_listed() -> None:
    found = catalog(ModelSpec("m", ("a", "b")), ModelSpec("lora", ("b",)))
    found.put("a", [entry("m")])
    found.put("b", [entry("m"), entry("lora", parent="m")])

    assert ids(found.body()) == ["m", "lora"]
    assert found.served() == {"m": ("a", "b"), "lora": ("b",)}


def test_dead_backend_hides_only_what_it_alone_has() -> None:
    found = catalog(ModelSpec("m", ("a", "b")), ModelSpec("lora", ("b",)))
    found.put("a", [entry("m")])
    found.put("b", [entry("m"), entry("lora")])
    found.set_live("b", live=False)

    assert ids(found.body()) == ["m"]
    found.set_live("b", live=True)
    assert ids(found.body()) == ["m", "lora"]


def test_configured_model_is_listed_while_its_backends_are_down() -> None:
    found = catalog(ModelSpec("m", ("a",), aliases=("coder",)), fixed=("m",))

    assert orjson.loads(found.body())["data"] == [
        {"id": "m", "object": "model", "created": 99, "owned_by": "radixgate"},
        {"id": "coder", "object": "model", "created": 99, "owned_by": "radixgate"},
    ]


def test_configured_model_that_its_backend_does_not_list_is_found() -> None:
    models = (ModelSpec("m", ("a", "b")), ModelSpec("lora", ("a",)))
    made = catalog(*models, fixed=("m",))
    made.put("a", [entry("other")])
    made.put("b", [entry("m")])

    assert made.unlisted("a") == ("m",)
    assert made.unlisted("b") == made.unlisted("nobody") == ()


def test_requests_for_a_dead_backends_model_can_still_be_told_to_wait() -> None:
    found = catalog()
    found.put("a", [entry("m")])
    found.set_live("a", live=False)

    assert found.served() == {"m": ("a",)}


def test_removed_backend_is_forgotten() -> None:
    found = catalog(ModelSpec("m", ("a",)))
    found.put("a", [entry("m")])
    found.drop("a")

    assert found.served() == {}
    assert ids(found.body()) == []


def test_key_sees_only_what_it_may_use() -> None:
    found = catalog(ModelSpec("qwen-7b", ("a",)), ModelSpec("llama", ("a",)))
    found.put("a", [entry("qwen-7b"), entry("llama")])

    assert ids(found.body(("qwen*",))) == ["qwen-7b"]
    assert ids(found.body(("*",))) == ["qwen-7b", "llama"]
    assert ids(found.body(())) == []
    assert found.one("llama", ("qwen*",)) is None


def test_one_model_is_found_by_id_or_alias() -> None:
    found = catalog(ModelSpec("org/m", ("a",), aliases=("coder",)))
    found.put("a", [entry("org/m")])

    assert orjson.loads(found.one("org/m") or b"") == entry("org/m")
    assert orjson.loads(found.one("coder") or b"") == entry("coder")
    assert found.one("other") is None


def test_body_is_made_once() -> None:
    found = catalog(ModelSpec("m", ("a",)))
    found.put("a", [entry("m")])
    first = found.body()
    changed = found.put("a", [entry("m") | {"created": 2, "permission": [{"id": "new"}]}])

    assert not changed
    assert found.body() is first


def test_changed_field_is_shown_though_no_id_changed() -> None:
    found = catalog(ModelSpec("m", ("a",)))
    found.put("a", [entry("m", max_model_len=1)])
    found.body()
    changed = found.put("a", [entry("m", max_model_len=2)])

    assert not changed
    assert orjson.loads(found.body())["data"][0]["max_model_len"] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.put("a", [entry("n")]),
        lambda c: c.put("a", []),
        lambda c: c.put("a", [entry("m"), entry("n")]),
        lambda c: c.put("b", [entry("m")]),
    ],
)
def test_changed_ids_are_told(change: Callable[[Catalog], bool]) -> None:
    found = catalog(ModelSpec("m", ("a",)))
    assert found.put("a", [entry("m")])

    assert change(found)


def test_entries_of_one_backend_are_capped() -> None:
    found = catalog()
    found.put("a", [entry(f"m{number}") for number in range(5_000)])

    assert len(found.served()) == 1_000


def test_views_are_capped() -> None:
    found = catalog(ModelSpec("m", ("a",)), fixed=("m",))
    for number in range(5_000):
        found.body((f"m{number}",))

    assert len(found._views) <= 256


def test_entries_are_read_from_an_engines_list() -> None:
    assert parse_models(b'{"object":"list","data":[{"id":"m"}],"models":[]}') == [{"id": "m"}]


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"data":{}}', b"<html>", b"\xff", b"{}"])
def test_what_is_no_list_of_models_is_none(body: bytes) -> None:
    assert parse_models(body) is None


@pytest.mark.parametrize("bad", ["null", "3", '"m"', "{}", '{"id":3}', '{"id":""}'])
def test_unusable_entry_does_not_hide_the_others(bad: str) -> None:
    assert parse_models(b'{"data":[%b,{"id":"m"}]}' % bad.encode()) == [{"id": "m"}]


def test_entry_too_deep_to_write_again_is_left_out() -> None:
    deep = b"[" * 300 + b"]" * 300

    assert parse_models(b'{"data":[{"id":"a","x":%b},{"id":"m"}]}' % deep) == [{"id": "m"}]


def test_no_limit_permits_everything() -> None:
    assert permits(None, "m")
    assert permits(("a*", "m"), "m")
    assert not permits(("M",), "m")
