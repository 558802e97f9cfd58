"""What an http target sends and how its answer is read: templates, signatures, statuses. No I/O.

The URL, the values of headers, and text anywhere in the body may name the run's arguments, as in
`https://api.example.com/orders/{args.order}`; headers and body also the job's secrets, as in
`Bearer {secrets.API_TOKEN}`. A JSON string that is nothing but one placeholder becomes the argument itself, a number or
an object as it may be. Other braces mean nothing. A URL's host is never a template: who may be called is the job's
word, not that of whoever starts a run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urljoin, urlsplit

import msgspec

LONGEST_URL = 8192
LONGEST_HEADERS = 16_384
MOST_PLACEHOLDERS = 10_000  # in headers and body
MOST_FILLED = 32 * 2**20  # characters that arguments and secrets add to one request: a template may repeat a long one
MOST_REDIRECTS = 10
LONGEST_RETRY_AFTER = 7 * 86_400.0
_LONGEST_ARGS_HEADER = 4096

_PLACEHOLDER = re.compile(r"\{(args|secrets)((?:\.[A-Za-z0-9_-]+)+)\}")
_URL = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?([/?].*)?", re.IGNORECASE)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", re.ASCII)
_NOT_IN_HEADER = re.compile(r"[^\t\x20-\x7e\x80-\xff]")
# Ours to say, or what would cut the request in two.
_HEADERS_REFUSED = re.compile(
    r"host|content-length|transfer-encoding|connection|keep-alive|upgrade|te|trailer|expect|proxy-.*|tocsin-.*|webhook-.*"
)
_WITHOUT_BODY = ("GET", "HEAD", "DELETE", "OPTIONS")
_MAY_PASS_LATER = (408, 425, 429)


class BadCall(ValueError):
    """What is wrong with a request that these arguments make, in words."""


class Target(Protocol):
    """An http target, as the server or as a worker reads it."""

    @property
    def url(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def headers(self) -> dict[str, str]: ...
    @property
    def body(self) -> Any: ...
    @property
    def sign_with(self) -> str | None: ...


class Call(NamedTuple):
    """A request, ready to be sent."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | None


# ── what a job may say ───────────────────────────────────────────────────────────────────────────────────────────


def wrong_call(target: Target, secrets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with an http target: (path, why). `secrets`: the names its job is given."""
    if (why := _wrong_url(target.url)) is not None:
        yield "target.url", why
    if target.method in ("CONNECT", "TRACE"):
        yield "target.method", "is not one that a job may use"
    for name, value in target.headers.items():
        if not _HEADER_NAME.fullmatch(name) or _HEADERS_REFUSED.fullmatch(name.lower()):
            yield f"target.headers.{name[:64] if name.isprintable() else ''}", "is not a header that a job may set"
        elif _NOT_IN_HEADER.search(value):
            yield f"target.headers.{name[:64]}", "holds a line end or another character that no header can"
    if sum(len(name) + len(value) for name, value in target.headers.items()) > LONGEST_HEADERS:
        yield "target.headers", f"are longer than {LONGEST_HEADERS} bytes"
    known = set(secrets)
    if target.sign_with is not None and target.sign_with not in known:
        yield "target.sign_with", "is not one of the names in secrets"
    # Count in the encoded text first, at the speed of C: a body may have millions of strings.
    written = msgspec.json.encode((target.headers, target.body))
    if written.count(b"{args.") + written.count(b"{secrets.") > MOST_PLACEHOLDERS:
        yield "target", f"must have at most {MOST_PLACEHOLDERS} placeholders in headers and body"
    elif b"{secrets." in written:
        for name in sorted(_secrets_named((*target.headers.values(), *_texts(target.body))) - known):
            yield "target", f"{{secrets.{name[:64]}}} is not one of the names in secrets"


def _wrong_url(url: str) -> str | None:
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url or "#" in url:
        return "is written in ASCII without spaces, backslashes and fragment; other characters percent-encoded"
    found = _URL.fullmatch(url)
    if found is None:
        return "is not http:// or https:// with a plain host, without user and password"
    if found["port"] is not None and not 0 < int(found["port"]) < 65536:
        return "has a port that does not exist"
    if _secrets_named([url]):
        return "holds a secret, which everybody on its way would read: put it into a header"
    return None


def _secrets_named(texts: Iterable[str]) -> set[str]:
    return {m[2][1:] for text in texts for m in _PLACEHOLDER.finditer(text) if m[1] == "secrets"}


def _texts(value: Any) -> Iterator[str]:
    """The strings of a JSON value. Not recursive: each would pass through one generator per level."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value


def host_of(url: str) -> str:
    """The host of a URL that `wrong_call` found nothing wrong with."""
    return urlsplit(url).hostname or ""


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────


def call_of(target: Target, args: Any, secrets: Mapping[str, str], about: Mapping[str, str]) -> Call:
    """The request that a target makes of a run's arguments. `about`: headers that say which run this is; a job's own
    header of the same name goes before them. Raises `BadCall`."""
    words = _Words({} if args is None else args, secrets)
    headers = {name: _header(name, words.text(value)) for name, value in target.headers.items()}
    body, media_type = _body(target, words)
    given = {name.lower() for name in headers}
    defaults = dict(about)
    if media_type is not None:
        defaults["Content-Type"] = media_type
    if args and (target.body is not None or body is None):
        told = msgspec.json.encode(args)
        if len(told) <= _LONGEST_ARGS_HEADER and told.isascii():
            defaults["Tocsin-Args"] = told.decode()
    headers |= {name: _header(name, value) for name, value in defaults.items() if name.lower() not in given}
    return Call(target.method, _url(target.url, words), headers, body)


def _url(template: str, words: _Words) -> str:
    length = 0

    def filled(match: re.Match[str]) -> str:
        nonlocal length
        text = words.told(match)
        length += len(text)
        if length > LONGEST_URL:  # before it is quoted, which takes a step for each character
            raise long
        return _in_url(text)

    long = BadCall(f"the URL is longer than {LONGEST_URL} characters with these arguments")
    url = _PLACEHOLDER.sub(filled, template)
    if len(url) > LONGEST_URL:
        raise long
    return url


class _Words:
    """What placeholders stand for. All that they add to one request is counted (`MOST_FILLED`)."""

    def __init__(self, args: Any, secrets: Mapping[str, str]) -> None:
        self.args, self._secrets = args, secrets
        self._known: dict[str, tuple[Any, str]] = {}
        self._filled = 0

    def value(self, match: re.Match[str]) -> Any:
        """The value of a placeholder."""
        return self._counted(match)[0]

    def told(self, match: re.Match[str]) -> str:
        """The value of a placeholder, as text."""
        return self._counted(match)[1]

    def _counted(self, match: re.Match[str]) -> tuple[Any, str]:
        known = self._known.get(match[0])
        if known is None:
            value = self._named(match)
            known = self._known[match[0]] = value, _plain(value)
        self._filled += len(known[1])
        if self._filled > MOST_FILLED:
            raise BadCall(f"the placeholders add more than {MOST_FILLED // 2**20} MiB with these arguments")
        return known

    def _named(self, match: re.Match[str]) -> Any:
        if match[1] == "secrets":
            if (found := self._secrets.get(match[2][1:])) is None:
                raise BadCall(f"the secret {match[2][1:]} was not delivered")
            return found
        value = self.args
        for name in match[2][1:].split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            raise BadCall(f"args{match[2]} is not given")
        return value

    def text(self, template: str) -> str:
        """A text with its placeholders filled in."""
        return _PLACEHOLDER.sub(self.told, template)

    def filled(self, value: Any) -> Any:
        """A JSON value with all its placeholders filled in."""
        if isinstance(value, str):
            whole = _PLACEHOLDER.fullmatch(value)
            return self.value(whole) if whole else self.text(value)
        if isinstance(value, dict):
            return {name: self.filled(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.filled(inner) for inner in value]
        return value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _in_url(text: str) -> str:
    if text in ("", ".", ".."):  # another path than the job's
        raise BadCall(f"{text!r} cannot stand in a URL")
    return quote(text, safe="", errors="backslashreplace")


def _header(name: str, value: str) -> str:
    if _NOT_IN_HEADER.search(value):
        raise BadCall(f"header {name} would hold a line end or another character that no header can")
    return value


def _body(target: Target, words: _Words) -> tuple[bytes | None, str | None]:
    """The body and its media type: without one of its own, a method that has a body sends the arguments."""
    if isinstance(target.body, str):
        return words.text(target.body).encode("utf-8", "backslashreplace"), "text/plain; charset=utf-8"
    if target.body is not None:
        return msgspec.json.encode(words.filled(target.body)), "application/json"
    if target.method in _WITHOUT_BODY:
        return None, None
    return msgspec.json.encode(words.args), "application/json"


# ── signatures (Standard Webhooks) ───────────────────────────────────────────────────────────────────────────────


def signed(secret: str, id_: str, timestamp: int, body: bytes | None) -> dict[str, str]:
    """The headers that prove a request ours. `secret`: `whsec_` and base64, or any other text as it is; several,
    separated by spaces, sign side by side while one takes the other's place."""
    content = b"%s.%d.%s" % (id_.encode(), timestamp, body or b"")
    macs = (hmac.new(_key(one), content, hashlib.sha256).digest() for one in secret.split())
    return {
        "Webhook-Id": id_,
        "Webhook-Timestamp": str(timestamp),
        "Webhook-Signature": " ".join("v1," + base64.b64encode(mac).decode() for mac in macs),
    }


def _key(secret: str) -> bytes:
    if secret.startswith("whsec_"):
        try:
            return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except (binascii.Error, ValueError):
            raise BadCall("the signing secret begins with whsec_, but is not base64") from None
    return secret.encode()


# ── what comes back ──────────────────────────────────────────────────────────────────────────────────────────────


def is_expected(status: int, expected: Sequence[str]) -> bool:
    """Whether a status is among those that mean success."""
    return any(one in (str(status), f"{status // 100}xx") for one in expected)


def error_class(status: int) -> str:
    """What a status that nobody expects is called. Those that may pass later are retried, the rest of their hundred is
    not, so they have names of their own."""
    return f"status_{status}" if status in _MAY_PASS_LATER else f"status_{status // 100}xx"


def retry_after(status: int, headers: Mapping[str, str], now: datetime) -> float | None:
    """In how many seconds a refused request is worth another try, at the earliest; None: nothing is known of that.

    A date counts from the answer's own `Date`, for two clocks are seldom one."""
    if status < 500 and status not in _MAY_PASS_LATER:
        return None
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:10]), LONGEST_RETRY_AFTER)
    at = _date(text)
    if at is not None:
        wait = (at - (_date(headers.get("Date", "")) or now)).total_seconds()
        return min(max(wait, 0.0), LONGEST_RETRY_AFTER)
    return 0.0 if status in _MAY_PASS_LATER else None


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else None


def _without_body(headers: Mapping[str, str]) -> dict[str, str]:
    """What is left of a request's headers when its body falls away: neither is what tells of the body still true, nor
    its signature."""
    gone = ("content-", "webhook-id", "webhook-timestamp", "webhook-signature")
    return {name: value for name, value in headers.items() if not name.lower().startswith(gone)}


def redirected(call: Call, status: int, location: str) -> Call | None:
    """The request that follows a redirect; None if none may.

    Another origin sees nothing that was meant for the first one, neither headers nor body, so one that asks for the
    body to be sent there leads nowhere; and nobody is led from https to http."""
    url = urljoin(call.url, location).partition("#")[0]
    if _wrong_url(url) is not None:
        return None
    before, after = urlsplit(call.url), urlsplit(url)
    if before.scheme == "https" and after.scheme != "https":
        return None
    keeps = status in (307, 308) or call.method in ("GET", "HEAD")
    method, body = (call.method, call.body) if keeps else ("GET", None)
    if (before.scheme, before.netloc) == (after.scheme, after.netloc):
        return Call(method, url, call.headers if keeps else _without_body(call.headers), body)
    return None if body is not None else Call(method, url, {}, None)
