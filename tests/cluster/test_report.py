"""The report says what the evidence shows: recoveries, first starts, losses, doubles; and a page for people."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from . import report
from .checker import RULES, Breach
from .nemesis import Fault
from .round import Outcome, Plan
from .test_checker import SECOND, T0, iso, truth

BEGAN = T0.timestamp()
MADE_AT_5S = f"{int((BEGAN + 5) * 1000):012x}"


def outcome(*breaches: Breach, faults: tuple[Fault, ...] = ()) -> Outcome:
    return Outcome(Plan(60, 7), truth(), list(breaches), list(faults), 3, (BEGAN, BEGAN + 60))


def kill(alone: bool, at: float = 13.0) -> Fault:
    return Fault("kill -9 of a worker", "worker-1", BEGAN + at, BEGAN + at + 1, {"worker_id": "w1", "alone": alone})


def told(evidence: Any) -> Any:
    """m2 lost its second attempt with worker w1, and started its third five seconds after the kill."""
    evidence.attempts["m2"][1] |= {"worker": "w1", "finished_at": iso(T0 + 17 * SECOND)}
    evidence.attempts["m2"][2] |= {"worker": "w2", "started_at": iso(T0 + 18 * SECOND)}
    return evidence


def test_a_recovery_goes_from_the_kill_to_the_next_start() -> None:
    other = Fault("clock step of a node", "server-1", BEGAN + 14, BEGAN + 15)
    (found,) = report.recoveries(told(truth()), [kill(alone=False), other, Fault("early", "x", BEGAN, BEGAN + 1)])
    assert (found.run_id, found.seconds, found.noticed, found.alone) == ("m2", 5.0, 4.0, False)
    assert found.meanwhile == ["clock step of a node (server-1)"]


def test_a_loss_without_a_kill_is_no_recovery() -> None:
    assert report.recoveries(told(truth()), [Fault("SIGSTOP of a worker", "worker-1", BEGAN)]) == []


def test_the_first_start_after_a_restart_is_of_a_run_made_since() -> None:
    evidence = truth()
    new = {"run_id": f"{MADE_AT_5S[:8]}-{MADE_AT_5S[8:]}-7000-8000-000000000000", "attempt": 1, "phase": "start"}
    old = new | {"run_id": f"{int(BEGAN * 1000):012x}"}
    evidence.lines = [
        old | {"wall_us": int((BEGAN + 5.1) * 1e6)},
        new | {"wall_us": int((BEGAN + 6.5) * 1e6)},
    ]
    restarts = [Fault("restart", "database", BEGAN + at - 1, BEGAN + at, {"ready": BEGAN + at}) for at in (2, 4, 55)]
    assert report.first_starts(evidence, restarts) == pytest.approx([2.5], abs=0.001)


def test_losses_and_doubles_are_counted() -> None:
    evidence = truth()
    assert (report.lost(evidence), report.doubled(evidence)) == (0, 0)
    evidence.runs = [run for run in evidence.runs if run["id"] != "m1"]
    evidence.jobs["job-once"] = None
    evidence.lines.append(evidence.lines[0])
    assert (report.lost(evidence), report.doubled(evidence)) == (2, 1)


def test_the_worst_hundredth_is_not_the_mean() -> None:
    assert report.spread([float(n) for n in range(1, 201)]) == {"count": 200, "p50": 101.0, "p99": 199.0, "most": 200.0}
    assert report.spread([]) == {"count": 0, "p50": None, "p99": None, "most": None}


def test_bars_are_held_or_missed() -> None:
    held = {bar["what"].split(",")[0]: bar["held"] for bar in report.figures(outcome())["bars"]}
    assert held["breaches"]
    assert not held["runs a second"]
    assert not held["recovery after kill -9 of a worker"], "what was not measured is not held"
    assert not report.figures(outcome(Breach("I1", "x", "gone")))["bars"][1]["held"]


class Reader(HTMLParser):
    """Reads a page and sees that every element is closed and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}
        if tag in ("table", "h1", "h2", "svg", "pre", "div", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("breaches", [(), (Breach("I4", "run <script>x", "told & untold"),)])
def test_the_page_stands_alone_and_says_everything(tmp_path: Path, breaches: tuple[Breach, ...]) -> None:
    made = report.figures(outcome(*breaches, faults=(kill(alone=True),)))
    report.write(made, tmp_path)
    assert json.loads((tmp_path / "chaos-report.json").read_text()) == made
    reader = Reader()
    reader.feed((tmp_path / "chaos-report.html").read_text(encoding="utf-8"))
    assert reader.open == []
    for words in ("seed 7", "kill -9 of a worker", "worker-1", *RULES, *(str(b) for b in breaches)):
        assert words in reader.words
    assert ("Every promise held" in reader.words) == (not breaches)
