from pathlib import Path

import pytest

from gateway.config import installed
from tests.unit.config import load_text

TEXT = """\
models:
  - name: m
    tokenizer: {file}
    backends:
      - {{name: a, url: "http://a:1", kv_events: "tcp://a:5557"}}
      - {{name: b, url: "http://b:1", kv_events: "tcp://b:5557"}}
      - {{name: c, srv: _http._tcp.c}}
discovery: {{nameservers: [10.0.0.1]}}
traces: {{endpoint: "http://otel:4318"}}
"""


def test_what_is_not_installed_is_told_once_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT.format(file=tmp_path)
    assert load_text(tmp_path, text).warnings == ()

    monkeypatch.setattr(installed, "is_missing", lambda _: True)
    warnings = load_text(tmp_path, text).warnings

    assert [(warning.line, warning.key) for warning in warnings] == [
        (3, "models[0].tokenizer"),
        (5, "models[0].backends[0].kv_events"),
        (7, "models[0].backends[2].srv"),
        (9, "traces.endpoint"),
    ]
    assert "needs the extra `otel`, which is not installed here" in str(warnings[3])
    assert "pip install '.[otel]'" in str(warnings[3])


def test_what_nothing_asks_for_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "is_missing", lambda _: True)

    assert load_text(tmp_path, 'backends: [{url: "http://h:1"}]').warnings == ()
