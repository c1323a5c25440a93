"""An engine in another process, over ``drivetrain_transport``.

    controller                                       worker
    Endpoint.bind(protocol=PROTOCOL)   ◄── joins ─── serve(address, factory=...)
    RemoteEngine(peer, config)         ── Start ───► factory(config): an engine
    generate                           ── Generate ► what one turn of the event loop asks for, in one message;
                                       ◄── Ended ───  chunks and completions, as they come
    pause, sleep, metrics, health, ... ────────────► the same call there
    update_weights                     ── Buckets ─► kept aside while it serves
                                       ── Commit ──► checked and loaded as one update

A worker has one engine at a time. It returns when its controller says goodbye or is lost.
"""

from drivetrain_transport import load_keys

from drivetrain_rollout.remote._engine import RemoteEngine
from drivetrain_rollout.remote._messages import PROTOCOL
from drivetrain_rollout.remote._worker import serve

__all__ = ["PROTOCOL", "RemoteEngine", "load_keys", "serve"]
