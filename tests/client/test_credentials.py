from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.client import credentials
from tocsin.errors import SetupError


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose home has been used by `tocsin up`."""
    text = 'url = "http://127.0.0.1:8470"\nkey = "filekey"\nworker_key = "fileworker"\n'
    (tmp_path / "credentials.toml").write_text(text)
    return {"TOCSIN_HOME": str(tmp_path)}


def found(*args: str, **kwargs: object) -> tuple[str, str]:
    got = credentials.find(*args, **kwargs)  # type: ignore[arg-type]
    return got.url, got.key


def test_what_is_given_comes_first(home: dict[str, str]) -> None:
    environ = home | {"TOCSIN_URL": "http://env", "TOCSIN_KEY": "envkey"}
    assert found("http://given/", "givenkey", environ=environ) == ("http://given", "givenkey")


def test_then_the_environment(home: dict[str, str]) -> None:
    environ = home | {"TOCSIN_URL": "http://env", "TOCSIN_KEY": "envkey"}
    assert found(environ=environ) == ("http://env", "envkey")


def test_then_the_file(home: dict[str, str]) -> None:
    assert found(environ=home) == ("http://127.0.0.1:8470", "filekey")
    assert found(environ=home | {"TOCSIN_KEY": "envkey"}) == ("http://127.0.0.1:8470", "envkey")


def test_a_worker_has_a_key_of_its_own(home: dict[str, str]) -> None:
    assert found(environ=home, purpose="worker")[1] == "fileworker"
    assert found(environ=home | {"TOCSIN_KEY": "k"}, purpose="worker")[1] == "k"
    both = home | {"TOCSIN_KEY": "k", "TOCSIN_WORKER_KEY": "w"}
    assert found(environ=both, purpose="worker")[1] == "w"
    assert found(environ=both)[1] == "k"


def test_the_files_key_is_never_sent_to_another_server(home: dict[str, str]) -> None:
    with pytest.raises(SetupError, match="no key is known for http://elsewhere"):
        credentials.find("http://elsewhere", environ=home)
    assert found("http://127.0.0.1:8470/", environ=home)[1] == "filekey"


def test_nothing_known_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"TOCSIN_URL.*tocsin up"):
        credentials.find(environ={"TOCSIN_HOME": str(tmp_path)})


@pytest.mark.parametrize("text", ["url = ", "\x00", 'url = "a'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "credentials.toml").write_text(text)
    with pytest.raises(SetupError, match=r"credentials\.toml"):
        credentials.find(environ={"TOCSIN_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("url", "key"), [("localhost:8470", "k"), ("http://x", "a b"), ("http://x", "a\n"), ("x", "k")]
)
def test_what_cannot_be_right_is_refused(url: str, key: str) -> None:
    with pytest.raises(SetupError):
        credentials.find(url, key, environ={})
