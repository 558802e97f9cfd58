"""`tocsin secret`: values come from standard input, a prompt or a file, and are shown nowhere."""

from __future__ import annotations

import json
from pathlib import Path

from scripted import Reply, Script, Tocsin

TIMES = {"created_at": "2026-06-01T00:00:00.000000Z", "updated_at": "2026-06-01T00:00:00.000000Z"}
TOKEN = {"name": "token", "version": 2} | TIMES
VALUE = "correct horse"


def test_set_from_standard_input_and_from_a_file(script: Script, tocsin: Tocsin, tmp_path: Path) -> None:
    script.on("PUT", "/v1/secrets/token", Reply(200, TOKEN))
    done = tocsin("secret", "set", "token", "--if-match", "1", input=f"{VALUE}\nanother line\n")
    assert done.exit_code == 0, done.output
    assert script.asked[0].body == {"value": VALUE} and script.asked[0].headers["if-match"] == '"1"'
    assert VALUE not in done.output and "token" in done.stdout
    key = tmp_path / "key.pem"
    key.write_text("-----BEGIN-----\nabc\n")
    assert json.loads(tocsin("secret", "set", "token", "--file", str(key), "--json").stdout) == TOKEN
    assert script.asked[1].body == {"value": "-----BEGIN-----\nabc\n"}
    tocsin("secret", "set", "token", "--file", "-", input="all\nof it\n")
    assert script.asked[2].body == {"value": "all\nof it\n"}
    assert tocsin("secret", "set", "token", "--file", str(tmp_path / "none")).exit_code == 2


def test_list_and_rm(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/secrets", {"items": [TOKEN], "next_cursor": None})
    assert "token" in tocsin("secret", "list").stdout
    script.on("DELETE", "/v1/secrets/token", Reply(204, b""))
    assert "deleted token" in tocsin("secret", "rm", "token").stdout


def test_keys_are_told_with_what_they_wrap(script: Script, tocsin: Tocsin) -> None:
    told = {"secrets": 3, "data_keys": 1}
    keys = [
        {"id": "aaaa", "known": True, "seals": True} | told,
        {"id": "bbbb", "known": False, "seals": False} | told,
    ]
    script.on("GET", "/v1/master-keys", {"items": keys})
    lines = tocsin("secret", "keys").stdout.splitlines()
    assert lines[0].startswith("aaaa  seals; wraps 3 secrets") and "MISSING" in lines[1]
    assert json.loads(tocsin("secret", "keys", "--json").stdout)["items"] == keys


def test_rotate_goes_on_until_nothing_is_left(script: Script, tocsin: Tocsin) -> None:
    waves = [{"rewrapped": 200, "remaining": 30}, {"rewrapped": 30, "remaining": 0}, {"rewrapped": 0, "remaining": 0}]
    script.on("POST", "/v1/master-keys/rotate", *waves)
    done = tocsin("secret", "rotate")
    assert done.exit_code == 0, done.output
    assert "200 wrapped anew, 30 to go" in done.output and "230 wrapped anew; older master keys may go" in done.output


def test_rotate_says_what_it_cannot_wrap(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/master-keys/rotate", {"rewrapped": 0, "remaining": 2})
    done = tocsin("secret", "rotate", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, {"rewrapped": 0, "remaining": 2})


def test_jobs_name_secrets_and_say_what_is_sensitive(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/jobs", Reply(422, {"code": "unknown_secret", "detail": "there is no secret"}))
    tocsin("job", "create", "--manual", "--secret", "TOKEN=billing", "--sensitive", "--", "true")
    assert script.asked[0].body["secrets"] == {"TOKEN": "billing"} and script.asked[0].body["sensitive"] is True
    job = "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071"
    script.on("POST", f"/v1/jobs/{job}/runs", Reply(202, {"id": job, "state": "ready"}))
    assert tocsin("job", "run", job, "--args", '{"pin": 1}', "--sensitive").exit_code == 0
    assert script.asked[-1].body == {"args": {"pin": 1}, "sensitive": True}
