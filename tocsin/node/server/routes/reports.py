"""Reports: what became of the runs of a stretch of time, as JSON or CSV."""

from __future__ import annotations

from tocsin.flow import reports
from tocsin.flow.reports import Asked
from tocsin.model.reports import Kind, grouping, span
from tocsin.model.tables import as_csv
from tocsin.node.server.http import Call, answer, instant_of, limit_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.replies import FailuresOf, RunsOf, UtilisationOf
from tocsin.node.server.routes.table import route

_ITEMS = {"runs": RunsOf, "failures": FailuresOf, "utilisation": UtilisationOf}


@route("GET", "/v1/reports/runs", "runs.read")
async def report_runs(call: Call) -> Reply:
    return await _report(call, "runs")


@route("GET", "/v1/reports/failures", "runs.read")
async def report_failures(call: Call) -> Reply:
    return await _report(call, "failures")


@route("GET", "/v1/reports/utilisation", "runs.read")
async def report_utilisation(call: Call) -> Reply:
    return await _report(call, "utilisation")


async def _report(call: Call, kind: Kind) -> Reply:
    query = call.query("from", "to", "by", "limit")
    by = grouping(kind, query.get("by"))
    wanted = span(instant_of(query, "from"), instant_of(query, "to"), by, call.node.db.clock.now())
    asked = Asked(wanted, by, limit_of({"limit": "100"} | query))
    made = await reports.report(call.node.db, call.node.parquet, call.who, kind, asked)
    if call.request.headers.get("accept", "").startswith("text/csv"):
        text = as_csv(_ITEMS[kind].__struct_fields__, made["items"])
        told = {"tocsin-report-complete": str(made["complete"]).lower()}
        return Reply(text.encode(), 200, told, "text/csv; charset=utf-8")
    return answer(made)
