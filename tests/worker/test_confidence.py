"""What a run is told in confidence, and arguments that do not come with it: given whole, and told no further."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import pytest

from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRETS = {"TOKEN": "s3cr3t-tok3n", "KEY": "-----BEGIN-----\nabcdefghijkl\n-----END-----\n"}
LARGE = {"rows": ["ü" * 1000] * 300}


async def test_a_program_gets_its_secrets_and_tells_none(shared: Gateway) -> None:
    script = 'test "$TOKEN" = s3cr3t-tok3n && echo "it is $TOKEN"; echo "$KEY"; printf %s "$TOKEN" | base64; env >&2'
    run = shared.process("sh", "-c", script, secrets=SECRETS)
    assert (await shared.end_of(run)).outcome == "succeeded"
    assert shared.text_of(run, "stdout") == ["it is ***", "***", "***", "***", "", "***"]
    assert "TOKEN=***" in shared.text_of(run, "stderr")
    assert "s3cr3t" not in str(shared.log_lines[run.run_id])


async def test_a_function_gets_its_secrets_and_tells_none(shared: Gateway) -> None:
    run = shared.python("confide", secrets=SECRETS, args={"fail": False})
    end = await shared.end_of(run)
    assert (end.outcome, end.result) == ("succeeded", {"names": ["KEY", "TOKEN"], "token": "***"})
    assert shared.text_of(run) == ["it is ***"]
    run = shared.python("confide", secrets=SECRETS, args={"fail": True})
    end = await shared.end_of(run)
    assert end.error is not None and end.error.message.startswith("*** is wrong") and "s3cr3t" not in str(end)


async def test_whatever_a_function_with_secrets_returns_is_told(shared: Gateway) -> None:
    run = shared.python("measure", secrets=SECRETS, args={"rows": ["abc"]})
    end = await shared.end_of(run)
    assert (end.outcome, end.result) == ("succeeded", 3)


async def test_sensitive_arguments_are_masked_and_others_are_not(shared: Gateway) -> None:
    args = {"iban": "DE02120300000000202051", "n": 3, "who": ["me", "somebody else"]}
    for sensitive in (True, False):
        run = shared.process("sh", "-c", 'echo "$TOCSIN_ARGS"', args=args, sensitive=sensitive)
        await shared.end_of(run)
        shown = {"iban": "***", "n": 3, "who": ["me", "***"]} if sensitive else args
        assert [json.loads(text) for text in shared.text_of(run)] == [shown]


def stored(gateway: Gateway, value: Any, token: str) -> dict[str, str]:
    """Put arguments where a run finds them."""
    data = gateway.payloads[token] = json.dumps(value).encode()
    return {"args_url": f"/v1/payloads/{token}", "args_sha256": hashlib.sha256(data).hexdigest()}


async def test_large_arguments_are_fetched_for_functions_and_programs(shared: Gateway) -> None:
    run = shared.python("measure", **stored(shared, LARGE, "a"))
    end = await shared.end_of(run)
    assert (end.outcome, end.result) == ("succeeded", 300_000)
    code = (
        "import json, os; args = json.load(open(os.environ['TOCSIN_ARGS_FILE']));"
        "print(sum(map(len, args['rows'])), repr(os.environ['TOCSIN_ARGS']))"
    )
    run = shared.process(sys.executable, "-c", code, **stored(shared, LARGE, "b"))
    assert (await shared.end_of(run)).outcome == "succeeded"
    assert shared.text_of(run) == ["300000 ''"]
    run = shared.process("sh", "-c", 'cat "$TOCSIN_ARGS_FILE" | wc -c', args=LARGE)
    assert (await shared.end_of(run)).outcome == "succeeded"
    assert shared.text_of(run) == [str(len(json.dumps(LARGE, ensure_ascii=False, separators=(",", ":")).encode()))]


async def test_arguments_that_cannot_be_fetched_end_the_attempt_and_no_other(shared: Gateway) -> None:
    gone = shared.process("echo", "no", args_url="/v1/payloads/nowhere", args_sha256="")
    changed = shared.process("echo", "no", **stored(shared, {"a": 1}, "c"))
    shared.payloads["c"] = b'{"a": 2}'
    untold = shared.python("measure", **stored(shared, {"rows": [10**30]}, "d"))
    fine = shared.process("echo", "yes")
    for run in (gone, changed, untold):
        end = await shared.end_of(run)
        assert end.outcome == "failed" and end.error is not None and end.error.class_ == "start"
        assert "could not be fetched" in end.error.message
    assert (await shared.end_of(fine)).outcome == "succeeded"
