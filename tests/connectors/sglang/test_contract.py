"""SGLang's storage contract on real nodes, many random operations, against a dictionary."""

import pytest

from kvpool.testing import sglang_contract
from kvpool.testing.sglang_pools import MhaPool, StatePool


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_thousand_random_operations_match_the_model(pool: str, seed: int) -> None:
    """Three layouts, MHA and MLA, both interfaces, states by address and by copy: each answer is the dictionary's, each byte too."""
    counts = sglang_contract.run(pool, seed, 1000)
    assert sum(counts.values()) == 1000
    assert len(counts) >= 11


def test_contract_notices_a_wrong_byte_and_a_wrong_answer(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract that passes whatever happens proves nothing."""
    backend = sglang_contract.create(pool, model_name="mutants", extra={"interface_v1": 1})
    for name, wrong in (
        ("exists", lambda real: lambda key: not real(key)),
        ("batch_get_v1", lambda real: lambda keys, indices: [True] * len(real(keys, indices))),
        ("batch_exists_v2", lambda real: lambda keys, transfers: real(keys, [])),
        ("batch_set_v1", lambda real: lambda keys, indices: [True] * len(keys)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(backend, name, wrong(getattr(backend, name)))
            backend.clear()
            kv = MhaPool("page_first", sglang_contract.PAGES)
            states = StatePool("page_first", sglang_contract.PAGES)
            with pytest.raises(AssertionError, match="operation"):
                sglang_contract.Contract(backend, kv, states, 3, by_pages=True).run(300)
    backend.close()
