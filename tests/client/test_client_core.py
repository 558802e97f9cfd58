"""The core without I/O: what is sent, how answers are read, when a call is repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from tocsin.client import calls
from tocsin.client.core import Answer, ApiError, Call, Page, Request, Retries, Unreachable, exchange, next_page, refusal
from tocsin.model.job import JobSpec
from tocsin.model.targets import ProcessTarget

JSON = {"content-type": "application/json"}


def answer(status: int, body: Any = None, headers: Mapping[str, str] = JSON) -> Answer:
    return Answer(status, headers, json.dumps(body).encode())


def play(call: Call[Any], *answers: Answer | Unreachable, retries: Retries | None = None) -> tuple[Any, list[Request]]:
    """Drive an exchange with these answers: what it returns or raises, and the requests it made."""
    flow = exchange(call, retries or Retries(), chance=lambda: 0.0)
    sent = [next(flow)]
    for one in answers:
        try:
            sent.append(flow.send(one))
        except StopIteration as end:
            return end.value, sent
        except (ApiError, Unreachable) as problem:
            return problem, sent
    raise AssertionError("the exchange wants more answers")


class TestRequests:
    def test_a_write_is_json_with_an_idempotency_key(self) -> None:
        request = calls.create_job({"name": "a"}).request()
        assert (request.method, request.path) == ("POST", "/v1/jobs")
        assert json.loads(request.content or b"") == {"name": "a"}
        assert request.headers["Content-Type"] == "application/json"
        assert len(request.headers["Idempotency-Key"]) == 36

    def test_two_calls_have_two_keys_and_a_given_one_is_kept(self) -> None:
        first, second = (calls.create_job({}).request().headers["Idempotency-Key"] for _ in range(2))
        assert first != second
        assert calls.create_job({}, idempotency_key="mine").request().headers["Idempotency-Key"] == "mine"

    def test_a_read_has_no_key_and_no_body(self) -> None:
        request = calls.get_job("j1").request()
        assert request.content is None
        assert "Idempotency-Key" not in request.headers

    def test_ids_cannot_leave_their_place_in_the_path(self) -> None:
        assert calls.get_run("../keys?x#y").request().path == "/v1/runs/..%2Fkeys%3Fx%23y"

    def test_a_query_names_only_what_is_given(self) -> None:
        call = calls.list_runs(state="dead", from_=datetime(2026, 12, 1, 10, tzinfo=timezone(timedelta(hours=1))))
        assert call.query == {"state": "dead", "from": "2026-12-01T09:00:00.000000Z"}

    def test_a_job_may_be_a_struct(self) -> None:
        content = calls.create_job(JobSpec(target=ProcessTarget(command=["true"]))).request().content
        assert json.loads(content or b"")["target"] == {"kind": "process", "command": ["true"]} | {
            "env": {},
            "cwd": None,
            "stdin": None,
            "shell": False,
            "sandbox": False,
        }

    def test_a_run_sends_only_what_is_given(self) -> None:
        assert json.loads(calls.run_job("j").request().content or b"") == {}
        at = datetime(2026, 12, 1, tzinfo=UTC)
        sent = calls.run_job("j", {"n": 1}, at=at, priority=0).request().content
        assert json.loads(sent or b"") == {"args": {"n": 1}, "at": "2026-12-01T00:00:00.000000Z", "priority": 0}


class TestExchange:
    def test_a_success_is_read(self) -> None:
        value, sent = play(calls.get_job("j"), answer(200, {"id": "j"}))
        assert value == {"id": "j"}
        assert len(sent) == 1

    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    def test_passing_trouble_is_repeated_with_the_same_key(self, status: int) -> None:
        value, sent = play(calls.create_job({}), answer(status), Unreachable("gone"), answer(201, {"id": "j"}))
        assert value == {"id": "j"}
        assert len({r.headers["Idempotency-Key"] for r in sent}) == 1
        assert [r.pause for r in sent] == [0.0, 0.05, 0.1]

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, 422, 500])
    def test_a_refusal_is_final(self, status: int) -> None:
        problem, sent = play(calls.create_job({}), answer(status, {"code": "some_code", "detail": "because"}))
        assert isinstance(problem, ApiError)
        assert (problem.status, problem.code, problem.detail) == (status, "some_code", "because")
        assert len(sent) == 1

    def test_a_repeat_still_in_flight_is_asked_again(self) -> None:
        value, _ = play(calls.create_job({}), answer(409, {"code": "in_flight"}), answer(201, {"id": "j"}))
        assert value == {"id": "j"}

    def test_it_gives_up_in_the_end(self) -> None:
        problem, sent = play(calls.get_job("j"), *[Unreachable("gone")] * 3, retries=Retries(attempts=3))
        assert isinstance(problem, Unreachable)
        assert len(sent) == 3

    @pytest.mark.parametrize("call", [calls.readyz(), calls.healthz(), calls.create_key("viewer")])
    def test_some_things_are_asked_once(self, call: Call[Any]) -> None:
        problem, sent = play(call, answer(503, {"code": "unavailable"}))
        assert isinstance(problem, ApiError)
        assert len(sent) == 1

    def test_an_answer_that_is_not_ours_says_so(self) -> None:
        problem, _ = play(calls.get_job("j"), Answer(200, {"content-type": "text/html"}, b"<html>"))
        assert isinstance(problem, Unreachable)
        assert "GET /v1/jobs/j" in str(problem)

    @pytest.mark.parametrize(
        ("content", "read"), [(b"", {}), (b"ok\n", {"status": "ok"}), (b'{"status":"ok"}', {"status": "ok"})]
    )
    def test_health_may_be_words_or_a_document(self, content: bytes, read: dict[str, str]) -> None:
        assert play(calls.healthz(), Answer(200, {}, content))[0] == read


class TestPauses:
    def test_back_off_grows_to_its_limit_and_is_jittered(self) -> None:
        retries, gone = Retries(attempts=9999, first_pause=1, longest_pause=4), Unreachable("gone")
        assert [retries.pause(gone, n, 0.0) for n in (1, 2, 3, 4)] == [0.5, 1, 2, 2]
        assert [retries.pause(gone, n, 1.0) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
        assert retries.pause(gone, 5000, 1.0) == 4

    def test_retry_after_is_obeyed(self) -> None:
        _, sent = play(calls.get_job("j"), answer(429, headers={"retry-after": "7"}), answer(200, {}))
        assert sent[1].pause == pytest.approx(7.05)

    def test_a_retry_after_too_long_to_wait_for_is_told(self) -> None:
        problem, sent = play(calls.get_job("j"), answer(429, headers={"retry-after": "3600"}))
        assert isinstance(problem, ApiError)
        assert problem.retry_after == 3600
        assert len(sent) == 1

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("0", 0),
            ("Tue, 01 Dec 2026 09:00:30 GMT", 30),
            ("Tue, 01 Dec 2026 08:00:00 -0000", 0),
            ("soon", None),
            ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
            ("", None),
        ],
    )
    def test_retry_after_is_seconds_or_a_date(self, text: str, seconds: float | None) -> None:
        now = datetime(2026, 12, 1, 9, tzinfo=UTC)
        assert refusal(Answer(503, {"retry-after": text}, b""), now).retry_after == seconds


class TestRefusals:
    def test_a_problem_document_is_kept_whole(self) -> None:
        wrong = [{"path": "name", "code": "invalid", "message": "too long"}]
        body = {"code": "invalid_input", "detail": "name: too long", "errors": wrong, "expected_offset": 4}
        problem = refusal(answer(422, body, {"content-type": "application/problem+json"}))
        assert problem.errors == wrong
        assert problem.problem["expected_offset"] == 4
        assert str(problem) == "name: too long (422 invalid_input)"

    @pytest.mark.parametrize("content", [b"<html>Bad Gateway</html>", b"{", b"[]", b'{"errors": 3}', b"\xff"])
    def test_whatever_a_proxy_says_becomes_an_error(self, content: bytes) -> None:
        problem = refusal(Answer(502, JSON, content))
        assert (problem.status, problem.code, problem.errors) == (502, "http_502", [])


class TestPages:
    def test_lists_go_by_cursor(self) -> None:
        following = next_page(calls.list_jobs(q="x"), Page(items=[], next_cursor="c1"))
        assert following is not None
        assert following.query == {"q": "x", "cursor": "c1"}
        assert next_page(following, Page(items=[{}])) is None

    def test_logs_go_by_sequence_and_end_with_an_empty_page(self) -> None:
        following = next_page(calls.logs("r", limit=2), Page(items=[{}], next_after=0))
        assert following is not None
        assert following.query == {"limit": "2", "after": "0"}
        assert next_page(following, Page(items=[], next_after=0)) is None
