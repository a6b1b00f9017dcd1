"""The order of work on the compute thread."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.engine.turns import Kind, Turns


def test_next_of_nothing_is_none() -> None:
    """An idle thread sees that there is nothing to do."""
    turns: Turns[str] = Turns()
    assert turns.next() is None
    assert len(turns) == 0


def test_next_alternates_a_chunk_and_all_waiting_steps() -> None:
    """Each round: one chunk, then one step of every decode that waits when it has ended."""
    turns: Turns[str] = Turns()
    for chunk in ("A1", "B1", "A2"):
        turns.add(Kind.CHUNK, chunk)
    for step in ("x", "y"):
        turns.add(Kind.STEP, step)
    assert [turns.next() for _ in range(6)] == ["A1", "x", "y", "B1", "A2", None]


def test_next_gives_a_late_step_its_turn_in_the_next_round() -> None:
    """A decode that comes back at once doesn't keep prefills from their chunk."""
    turns: Turns[str] = Turns()
    turns.add(Kind.STEP, "x")
    turns.add(Kind.CHUNK, "A1")
    seen = []
    for _ in range(6):
        job = turns.next()
        seen.append(job)
        if job == "x":
            turns.add(Kind.STEP, "x")
        if job == "A1":
            turns.add(Kind.CHUNK, "A1")
    assert seen == ["A1", "x", "A1", "x", "A1", "x"]


def test_discard_forgets_a_waiting_job_only() -> None:
    """A cancelled job isn't run; one that was taken can't be withdrawn."""
    turns: Turns[str] = Turns()
    turns.add(Kind.STEP, "x")
    turns.add(Kind.STEP, "y")
    assert turns.next() == "x"
    assert turns.discard("y")
    assert not turns.discard("x")
    turns.add(Kind.CHUNK, "A")
    assert turns.next() == "A"


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["chunk", "step", "drop", "next"]), max_size=200))
def test_turns_lose_nothing_and_never_put_two_chunks_before_a_waiting_step(actions: list[str]) -> None:
    """Under any interleaving: each job comes once, in order of its kind, and a step waits for at most one chunk, a running one included."""
    turns: Turns[tuple[str, int]] = Turns()
    waiting: dict[str, list[tuple[str, int]]] = {"chunk": [], "step": []}
    may_pass: dict[tuple[str, int], int] = {}
    running = ""
    for number, action in enumerate(actions):
        if action in waiting:
            job = (action, number)
            turns.add(Kind(action), job)
            waiting[action].append(job)
            may_pass[job] = 0 if running == "chunk" else 1
        elif action == "drop" and waiting["step"]:
            assert turns.discard(waiting["step"].pop(number % len(waiting["step"])))
        elif action == "next":
            taken = turns.next()
            assert (taken is None) == (not waiting["chunk"] and not waiting["step"])
            running = taken[0] if taken else ""  # nothing runs once the thread has found nothing to do
            if taken is not None:
                assert taken == waiting[taken[0]].pop(0)
                if taken[0] == "chunk":
                    for job in waiting["step"]:
                        may_pass[job] -= 1
                        assert may_pass[job] >= 0
        assert len(turns) == len(waiting["chunk"]) + len(waiting["step"])
