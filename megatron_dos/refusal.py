# SPDX-License-Identifier: Apache-2.0
"""How a training ends that is refused: one message on one rank, exit status 2 on all, no traceback.

A refusal is an exception like any other, so programs that call this package catch it. Only where nobody catches it, in
a process that runs Megatron's command line, does `end_in_one_message` replace the traceback.

[Note: who speaks] As a rule all ranks are refused, at moments that are seconds apart, and a launcher ends all ranks
when the first has ended. Ranks therefore meet in a store before any of them ends: torch.distributed's, or torchrun's
own before torch.distributed is initialised. Rank 0 speaks as soon as it is there. The others wait for it, and one of
them speaks when it does not come, since it may not be refused. Where there is no store, rank 0 speaks, and the others
give it time to.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

__all__ = ["EXIT_STATUS", "Refusal", "end_in_one_message"]

EXIT_STATUS = 2
_KEY = "megatron-dos refusal"
_PATIENCE_S = 15.0
"""How long ranks wait for one another. All import the same files and build the same model: seconds lie between."""
_POLL_S = 0.05


class Refusal(Exception):
    """What was asked for cannot be done; the message says why and names the way out."""


def end_in_one_message() -> None:
    """Have an uncaught Refusal end this process with its message alone and `EXIT_STATUS`. Harmless the second time."""
    previous = sys.excepthook
    if getattr(previous, "_ends_refusals", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Refusal):
            previous(kind, error, trace)
            return
        sys.stdout.flush()
        if _speaks_here():
            # Not sys.stderr: torch.distributed calls this hook with a buffer in its place, which the exit would drop.
            print(f"megatron-dos: {error}", file=sys.__stderr__, flush=True)
        _wait_for_others()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it when the first rank has ended: so does this
        raise SystemExit(EXIT_STATUS)  # Python exits with the status of a SystemExit that its hook raises

    hook._ends_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def _store() -> Any:
    """Where the ranks of this job meet; None where there is nothing yet."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return None
    try:
        if distributed.is_initialized():
            return distributed.distributed_c10d._get_default_store()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_PATIENCE_S))
    except Exception:  # no store is no reason to hide the message
        return None
    return None


def _key(what: str) -> str:
    return f"{_KEY} {what} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _speaks_here() -> bool:
    """Whether this rank has to print the message. See [Note: who speaks]."""
    rank, size = _rank_and_size()
    if size == 1:
        return True
    store = _store()
    if store is None:
        if rank:
            time.sleep(_PATIENCE_S / 3)
        return rank == 0
    try:
        store.add(_key("arrived"), 1)
        deadline = time.monotonic() + _PATIENCE_S
        while rank and not store.add(_key("spoken"), 0) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return store.add(_key("spoken"), 1) == 1
    except Exception:  # the store is gone, with the rank that had it
        return rank == 0


def _wait_for_others() -> None:
    """Do not end before all ranks are here, or could have been."""
    store, size = _store(), _rank_and_size()[1]
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while store is not None and store.add(_key("arrived"), 0) < size and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if store is not None:
            # The rank with the store in it leaves last, or the others' last look would fail.
            store.add(_key("leaving"), 1)
            while store.add(_key("leaving"), 0) < store.add(_key("arrived"), 0) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
    except Exception:
        return
