"""What answers of an actor, late and lost ones included, make of a row."""

from dataclasses import replace

from kvpool.cli.procs import ProcessSpec
from kvpool.cli.ray.slot import Slot
from kvpool.cli.table import ProcessRow

RUNNING = ProcessRow(name="decode-0", role="decode", index=0, state="running", pid=41, deaths=0, streak=0, last_exit="", since_s=2.0)
ENDED = replace(RUNNING, state="ended", pid=None, deaths=1, streak=1, last_exit="killed by SIGKILL", since_s=0.1)


def _slot() -> tuple[Slot, list[str]]:
    events: list[str] = []
    return Slot(ProcessSpec(role="decode", index=0, argv=("python",)), events.append), events


def test_slot_runs_once_its_process_was_seen() -> None:
    """The start is dated from the question, so never later than it was; nothing is told twice."""
    slot, events = _slot()
    assert slot.row(5.0).state == "waiting"
    slot.looked(replace(RUNNING, state="waiting", pid=None), "h", "h/1", asked_s=9.0, now_s=9.5)
    assert slot.row(9.5).state == "waiting"
    for now_s in (11.0, 12.0):
        slot.looked(RUNNING, "h", "h/1", asked_s=10.0, now_s=now_s)
    assert slot.row(13.0) == replace(RUNNING, since_s=5.0)
    assert events == ["decode-0 started (pid 41 on h)"]


def test_slot_counts_each_death_once() -> None:
    """The last words of an actor, Ray's own report and the killer all tell of the same death."""
    slot, events = _slot()
    slot.looked(RUNNING, "h", "h/1", asked_s=10.0, now_s=10.1)
    slot.looked(ENDED, "h", "h/1", asked_s=11.0, now_s=11.1)
    slot.died("h/1", "killed by SIGKILL", 11.2)
    slot.died(slot.life, "lost: the actor is restarting", 11.3)
    slot.looked(RUNNING, "h", "h/1", asked_s=11.0, now_s=11.4)
    row = slot.row(12.0)
    assert (row.state, row.pid, row.deaths, row.streak, row.last_exit) == ("waiting", None, 1, 1, "killed by SIGKILL")
    slot.looked(replace(RUNNING, pid=52, since_s=0.5), "h", "h/2", asked_s=13.0, now_s=13.1)
    assert (slot.row(13.5).state, slot.row(13.5).pid, slot.row(13.5).since_s) == ("running", 52, 1.0)
    assert events[1:] == ["decode-0 died (killed by SIGKILL), Ray starts it again", "decode-0 started (pid 52 on h)"]


def test_slot_notices_a_life_that_ended_unseen() -> None:
    """A host that is lost says nothing: the successor's answer is the news."""
    slot, events = _slot()
    slot.looked(RUNNING, "h", "h/1", asked_s=10.0, now_s=10.1)
    slot.looked(replace(RUNNING, pid=7), "k", "k/1", asked_s=50.0, now_s=50.1)
    assert (slot.row(51.0).state, slot.row(51.0).pid, slot.row(51.0).deaths) == ("running", 7, 1)
    assert events[-1] == "decode-0 started (pid 7 on k)"


def test_slot_counts_deaths_too_quick_to_be_seen_alive() -> None:
    """A wrong flag kills a process within a look: its streak must grow, or the start would wait for ever."""
    slot, _ = _slot()
    for life in range(3):
        slot.looked(ENDED, "h", f"h/{life}", asked_s=float(life), now_s=life + 0.1)
    assert (slot.row(9.0).streak, slot.row(9.0).deaths, slot.row(9.0).state) == (3, 3, "waiting")


def test_slot_that_ray_gives_up_keeps_the_first_reason() -> None:
    """That Ray won't restart it is less telling than why it died."""
    slot, events = _slot()
    slot.looked(RUNNING, "h", "h/1", asked_s=10.0, now_s=10.1)
    slot.looked(ENDED, "h", "h/1", asked_s=11.0, now_s=11.1)
    slot.gave_up("The actor died", 12.0)
    slot.gave_up("The actor died", 13.0)
    row = slot.row(14.0)
    assert (row.state, row.deaths, row.last_exit, row.since_s) == ("ended", 1, "killed by SIGKILL", 2.0)
    assert events[-1] == "decode-0 stays down (killed by SIGKILL)"
