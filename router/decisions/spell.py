"""A request's choices and what became of it, as the JSON of GET /kvpool/explain/{id}."""

from typing import Any

from kvpool.policy.routing.values import Scored
from router.decisions.ring import Explained, Note, Request, happened


def spelled(request: Request) -> dict[str, Any]:
    """Costs and terms in the ranking's own unit; times in milliseconds from the request's arrival; tokens as counts."""
    return {
        "request_id": request.request_id,
        "answer_id": request.answer_id,
        "tenant": request.tenant,
        "jobs": [_job(job) for job in request.jobs.values()],
    }


def _job(job: Explained) -> dict[str, Any]:
    outcome = job.outcome if job.trace is None else happened(job.trace)
    return {
        "id": job.job_id,
        "running": job.trace is not None,
        "decisions": [_note(note, job.arrived_ns) for note in job.notes],
        "dropped": job.dropped,
        "happened": outcome,
    }


def _note(note: Note, arrived_ns: int) -> dict[str, Any]:
    ask = note.ask
    return {
        "at_ms": round((note.at_ns - arrived_ns) / 1e6, 3),
        "role": note.role,
        "policy": note.ranking.policy,
        "unit": note.ranking.unit,
        "prompt_tokens": ask.prompt_tokens,
        "output_tokens": ask.output_tokens,
        "priority": ask.priority,
        "chosen": None if note.chosen is None else note.chosen.id,
        "candidates": [_candidate(scored) for scored in note.ranking.scored],
        "left_out": note.left_out,
    }


def _candidate(scored: Scored) -> dict[str, Any]:
    candidate = scored.candidate
    return {
        "worker": candidate.worker.id,
        "incarnation": candidate.worker.incarnation,
        "cost": scored.cost,
        "terms": dict(scored.terms),
        "resident_tokens": candidate.resident_tokens,
        "pool": [{"tier": str(source.tier), "near": source.near, "tokens": source.tokens} for source in candidate.pool],
        "fetch_tokens": scored.fetch_tokens,
        "compute_tokens": scored.compute_tokens,
        "wait_ms": round(scored.wait_ns / 1e6, 3),
        "active": candidate.active,
        "queued": candidate.queued,
        "backlog_tokens": candidate.backlog_tokens,
        "decode_tokens": candidate.decode_tokens,
        "suspect": candidate.suspect,
    }
