"""What the other end-to-end tests take for granted about the engines, checked without a gateway."""

from tests.e2e.fleet import MODEL, Fleet, fetch

PROMPT = "def parse(self, line):\n    return line.split()\n" * 40


def test_both_replicas_serve_the_tiny_model(fleet: Fleet) -> None:
    assert len(set(fleet.urls)) == 2
    for url in fleet.urls:
        served = fetch(url + "/v1/models").json()["data"]
        assert [model["id"] for model in served] == [MODEL]


def test_an_engine_reports_cached_tokens_only_for_what_it_has_seen(fleet: Fleet) -> None:
    first, second = fleet.urls
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
        "temperature": 0,
    }

    def cached(url: str) -> tuple[int, int]:
        usage = fetch(url + "/v1/chat/completions", method="POST", body=body).json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0, usage["prompt_tokens"]

    cold, prompt = cached(first)
    warm, _ = cached(first)
    elsewhere, _ = cached(second)

    assert warm >= prompt - 64
    assert max(cold, elsewhere) < prompt // 2
