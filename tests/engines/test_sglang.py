"""The HiCache backend in SGLang's own package: its factory makes it, its base class bears it, its host pools name the memory.

SGLang's engine doesn't start on a CPU, so nothing here serves a model.
"""

from collections.abc import Callable

import pytest

from kvpool.testing.node_process import NodeProcess

CONTRACT = """if True:
    import sys
    from kvpool.testing import sglang_contract
    for seed in map(int, sys.argv[2:]):
        print(sum(sglang_contract.run(sys.argv[1], seed, 1000).values()))
"""
INJECTED = """if True:
    import os, sys
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    from kvpool.testing.sglang_contract import KEYS, create
    from kvpool.testing.sglang_pools import MhaPool
    import torch
    made = create(sys.argv[1], model_name="injected", extra={"interface_v1": 1})
    made.register_mem_pool_host(MhaPool("page_first", 8))
    made.on_host_pools_registered()
    put = [made.batch_set_v1(KEYS[:8], torch.arange(32)) for _ in range(40)]
    got = [made.batch_get_v1(KEYS[:8], torch.arange(32)) for _ in range(40)]
    print(type(made).__name__, sorted({sum(one) for one in put}), sorted({sum(one) for one in got}))
"""
REAL_POOLS = """if True:
    import importlib.abc, importlib.machinery, sys
    from unittest.mock import MagicMock

    class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        '''What SGLang imports beside the classes that are wanted, and isn't here: kernels and the like.'''

        def find_spec(self, name, path, target=None):
            known = name.split(".")[0] in sys.argv[1].split(",")
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

        def create_module(self, spec):
            return MagicMock(name=spec.name, __name__=spec.name, __path__=[], __spec__=spec, __version__="99.0", __file__="")

        def exec_module(self, module):
            pass

    sys.meta_path.append(Absent())
    import torch
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from kvpool.testing.sglang_pools import DIM, LAYERS, PAGE, MhaPool, MlaPool

    def real(kind, twin, buffer):
        made = object.__new__(kind)
        made.__dict__.update(twin.__dict__, kv_buffer=buffer, device="cpu", pin_memory=False, kv_cache_dim=buffer.shape[-1], dcp_size=1)
        return made

    some = torch.cat([torch.arange(PAGE) + PAGE * page for page in (5, 0, 3)])
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        twin = MhaPool(layout, 8)
        twin.kv_buffer.copy_(torch.randn(twin.kv_buffer.shape))
        host = real(MHATokenToKVPoolHost, twin, twin.kv_buffer)
        assert host.get_page_buffer_meta(some) == twin.get_page_buffer_meta(some), layout
        assert torch.equal(host.get_data_page(20), twin.get_data_page(20)), layout
        if layout == "page_head":
            assert host.get_split_heads_page_buffer_meta(some, 2) == twin.get_split_heads_page_buffer_meta(some, 2)
        print(layout)
    shapes = {"layer_first": (LAYERS, 32, 1, 12), "page_first": (32, LAYERS, 1, 12), "page_first_direct": (8, LAYERS, PAGE, 1, 12)}
    for layout, shape in shapes.items():
        host = real(MLATokenToKVPoolHost, MlaPool(layout, 8), torch.randn(shape).to(torch.bfloat16))
        pointers, sizes = host.get_page_buffer_meta(some)
        assert sum(sizes) == 3 * LAYERS * PAGE * 12 * 2 and len(pointers) == len(sizes), layout
        print("mla", layout, len(pointers))
"""
ABSENT = (
    "torchvision,torchaudio,torchao,sgl_kernel,flashinfer,triton,deep_gemm,decord,xgrammar,outlines,llguidance,zmq,uvloop,gguf,einops,"
    "compressed_tensors,soundfile,setproctitle,partial_json_parser,openai_harmony,modelscope,pynvml,sentencepiece,timm,av,scipy,IPython"
)


@pytest.fixture
def nodes(pool_node: Callable[..., NodeProcess]) -> str:
    """Addresses of three nodes."""
    return ",".join(pool_node("--capacity", "64MiB").address for _ in range(3))


def test_thousand_random_operations_pass_through_sglangs_factory(sglang_python: str, run_by: Callable[..., str], nodes: str) -> None:
    """The same operations as in `tests/connectors/sglang`, on the package that engines import: four layouts, MHA and MLA."""
    seeds = ["0", "1", "2", "3", "4", "5"]
    assert run_by(sglang_python, CONTRACT, nodes, *seeds, timeout_s=280).split() == ["1000"] * len(seeds)


def test_sglangs_failure_injector_wraps_the_backend(sglang_python: str, run_by: Callable[..., str], nodes: str) -> None:
    """SGLang's own test switch puts a proxy in front, which knows only what the base class has."""
    assert run_by(sglang_python, INJECTED, nodes).strip() == "HiCacheStorageFailureInjector [0, 8] [0, 8]"


def test_host_pools_of_the_tests_are_as_sglangs_are(sglang_python: str, run_by: Callable[..., str]) -> None:
    """Addresses and pages of the small host pools that the contract runs on are those of the classes they stand for."""
    lines = run_by(sglang_python, REAL_POOLS, ABSENT, timeout_s=280).split("\n")
    assert lines[:-1] == [
        "layer_first", "page_first", "page_first_direct", "page_head", "mla layer_first 9", "mla page_first 3", "mla page_first_direct 3",
    ]  # fmt: skip
