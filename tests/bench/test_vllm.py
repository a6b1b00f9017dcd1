"""`bench.vllm`: from what was taken to the figures; `tests/engines/test_bench.py` takes some."""

from collections.abc import Sequence

from bench.vllm import Found, Load, Pass, good, summary


def took(ttft_ms: float, answers: Sequence[str] = ("a", "b"), external: float = 0.0, failed: int = 0) -> Pass:
    return Pass(ttft_ms=ttft_ms, answers=answers, failed=failed, prompt_tokens=1000.0, external_tokens=external)


def found(second: Pass, *, again: Pass | None = None, tokens: Sequence[int] = (1, 2)) -> Found:
    return Found(first=took(2000), second=second, tokens=[tokens], again=again, tokens_again=[(1, 2)])


def test_figures_are_ratios_of_second_passes_and_medians_of_rounds() -> None:
    """What is compared is the pass in which only the external cache can help; one slow round doesn't decide."""
    rounds = [
        {"none": found(took(none)), "kvpool": found(took(200, external=900)), "lmcache": found(took(600, external=800))}
        for none in (1000, 800, 9000)
    ]
    answer = summary(rounds)
    assert answer["ttft_speedup"] == 5.0
    assert answer["over_lmcache"] == 3.0
    assert answer["external_hit"] == 0.9
    assert answer["external_hit_lmcache"] == 0.8
    assert answer["exact"] == answer["exact_lmcache"] == 1.0
    assert good(answer)


def test_answers_are_compared_with_those_behind_a_cached_prefix() -> None:
    """Computing a prompt in one go rounds otherwise than computing it behind a cached prefix: like is compared with like."""
    none = found(took(1000, ("a", "x")), again=took(200, ("a", "b")), tokens=(1, 9))
    answer = summary([{"none": none, "kvpool": found(took(200))}])
    assert answer["exact"] == 1.0
    assert answer["exact_cold"] == 0.333
    wrong = summary([{"none": none, "kvpool": found(took(200, ("a", "c")))}])
    assert wrong["exact"] == 0.667


def test_one_failed_request_or_wrong_answer_is_not_good() -> None:
    """A fast wrong answer is worth nothing."""
    best = {"failed": 0, "ttft_speedup": 9.0, "over_lmcache": 2.0, "exact": 1.0}
    assert good(best)
    for name, value in (("failed", 1), ("exact", 0.99), ("over_lmcache", 0.9), ("ttft_speedup", 2.9)):
        assert not good({**best, name: value})


def test_load_fits_the_engine() -> None:
    """A prompt that is longer than the engine takes would fail, and measure nothing."""
    load = Load(prefixes=2, prompts=4, prefix=1536, suffix=64)
    assert 1600 + load.answer < load.longest < 2048 + 64
    argv = load.argv()
    assert argv[argv.index("--prefix-repetition-prefix-len") + 1] == "1536"
