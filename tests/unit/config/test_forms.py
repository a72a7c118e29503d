import pytest

from gateway.config.forms import FORMS, entry_path


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("url", "http://h:1"),
        ("url", "https://vllm.internal"),
        ("url", "http://[::1]:8000/"),
        ("url", "http://10.0.0.1:8000"),
        ("host", "0.0.0.0"),
        ("host", "::"),
        ("host", "vllm_a.internal"),
        ("name", "a-1.b:8000"),
        ("name", "[::1]:8000"),
        ("sha256", "aF" * 32),
        ("origin", "*"),
        ("origin", "https://ui.example.com:8443"),
        ("network", "10.0.0.0/8"),
        ("network", "fd00::1"),
        ("zmq", "tcp://h:5557"),
        ("zmq", "ipc:///tmp/x"),
        ("zmq", "tcp://*:5557"),
        ("path", "/v1/messages"),
        ("env_name", "VLLM_KEY"),
        ("text", "glob *"),
    ],
)
def test_right_texts_pass(form: str, text: str) -> None:
    assert FORMS[form].ok(text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("url", "h:8000"),
        ("url", "ftp://h"),
        ("url", "http://h:1/v1"),
        ("url", "http://user:secret@h:1"),
        ("url", "http://h:99999"),
        ("url", "http://h:"),
        ("url", "http://h:0"),
        ("url", "http://h?x=1"),
        ("url", "http://h#"),
        ("url", "http://[::1"),
        ("url", "http://a b"),
        ("url", "http://"),
        ("host", "http://h"),
        ("host", "h:80"),
        ("host", "300.1.1.1"),
        ("host", ""),
        ("name", ""),
        ("name", "a b"),
        ("name", "x" * 129),
        ("name", "ünïcode"),
        ("sha256", "a" * 63),
        ("sha256", "g" * 64),
        ("origin", "https://h/"),
        ("network", "10.0.0.0/99"),
        ("zmq", "tcp://h"),
        ("zmq", "http://h:1"),
        ("zmq", "tcp://*"),
        ("path", "v1"),
        ("path", "/a b"),
        ("env_name", "A-B"),
        ("text", ""),
        ("text", "a\nb"),
    ],
)
def test_wrong_texts_do_not(form: str, text: str) -> None:
    assert not FORMS[form].ok(text)


def test_an_entry_with_an_unreadable_name_has_a_path_all_the_same() -> None:
    assert entry_path("classes", "chat", "name") == "classes.chat"
    assert entry_path("classes", "a b", "name") == "classes.'a b'"
    assert entry_path("x", "a b", None) == "x.a b"
