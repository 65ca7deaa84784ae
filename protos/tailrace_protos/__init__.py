"""Tailrace on the wire: the atlas of what the services say to each other.

| module | holds | who speaks it |
|---|---|---|
| `base` | encoding, raw arrays, `MalformedMessageError` | all |
| `subjects` | every subject, stream, bucket and key prefix | all |
| `control` | server registry, leases, activity, run status | inference, agents, scheduler, cli |
| `generation` | `GenerateRequest` in, `TokenChunk` out | agents -> inference |
| `chat` | messages, tool calls, tool schemas | all that reads or writes text |
| `episode` | queued `EpisodeTask`, `Outcome` | scheduler -> agents |
| `journal` | finished model and tool calls of a running episode | agents -> Redis -> agents |
| `reward` | `ScoreRequest` in, `ScoreReply` out | agents -> reward |
| `session` | `LedgerNode`s, `OpenSession` to `SessionExport` | agents <-> gateway <-> Redis |
| `tool` | tool calls, their results, probes and sessions | agents, gateway, cli -> tool workers |
| `trajectory` | settled episodes and closed groups | agents -> Redis -> learner |
| `weights` | manifests, sources, chunks, model card | learner -> weight_sync -> inference |
| `event` | the audit events of a run | all -> outbox -> scheduler -> EVENTS |
"""
