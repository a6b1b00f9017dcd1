"""The secondary tier under vLLM's own TieringOffloadingManager: all that runs in the scheduler's process, without a model.

vLLM's worker of this spec refuses CPUs, so nothing here serves one.
"""

from collections.abc import Callable

from kvpool.testing.node_process import NodeProcess

PRELUDE = """if True:
    import os, signal, socket, sys, time, uuid
    import numpy as np
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig, OffloadingConfig, OffloadingGroupConfig, OffloadingModelConfig, OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    POOL, CHUNK = sys.argv[1], 8192

    class Scheduler:
        '''A scheduler's half of one engine: steps, and what a GPU would write to the host memory.'''

        def __init__(self, model="m", chunks=16, **tier):
            tier = {"type": "KvpoolTier", "module_path": "kvpool.connectors.vllm_tier", "pool": POOL, **tier}
            extra = {"cpu_bytes_to_use": chunks * CHUNK, "secondary_tiers": [tier]}
            self.spec = TieringOffloadingSpec(OffloadingConfig(
                groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),),
                worker_kv_bytes_per_block=CHUNK, enable_kv_cache_events=True, extra_config=extra, engine_id=uuid.uuid4().hex,
                model=OffloadingModelConfig(name=model, dtype="bfloat16"),
                cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
                parallel=OffloadingParallelConfig(
                    rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0, data_parallel_size=1,
                    data_parallel_rank_local=None, is_parallelism_agnostic=True,
                ),
            ))
            self.manager = self.spec.get_manager()
            self.tier = self.manager.secondary_tiers[0]
            self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

        def step(self):
            self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))

        def settle(self):
            while self.manager.has_pending_work():
                self.step()
                time.sleep(0.002)

        def save(self, keys, request):
            context = ReqContext(req_id=request)
            self.manager.on_new_request(context)
            made = self.manager.prepare_store(keys, context)
            for key, chunk in zip(made.keys_to_store, made.store_spec.chunk_ids):
                self.memory[chunk] = content(key)
            self.manager.complete_store(made.keys_to_store, context)
            self.step()
            self.settle()
            self.manager.on_request_finished(context)

        def load(self, keys, request):
            '''What each key comes to: HIT with the right bytes, or MISS.'''
            context, found = ReqContext(req_id=request), []
            self.manager.on_new_request(context)
            for key in keys:
                while (result := self.manager.lookup(key, context)) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                    self.step()
                    time.sleep(0.002)
                found.append(result.name)
            hits = [key for key, name in zip(keys, found) if name == "HIT"]
            if hits:
                spec = self.manager.prepare_load(hits, context)
                for key, chunk in zip(hits, spec.chunk_ids):
                    assert np.array_equal(self.memory[chunk], content(key)), key
                self.manager.complete_load(hits, context)
            self.manager.on_request_finished(context)
            self.step()
            return found

    def key(i):
        return make_offload_key(i.to_bytes(32, "big"), 0)

    def content(key):
        return np.random.default_rng(list(key)).integers(0, 256, CHUNK, dtype=np.uint8)
"""
TWO_ENGINES = (
    PRELUDE
    + """
    first = Scheduler(enable_kv_events=True, locality="REMOTE")
    first.save([key(i) for i in range(6)], "r0")
    told = [(event.medium.name, len(event.keys)) for event in first.manager.take_events() if event.medium.name == "STORAGE"]
    second, other = Scheduler(), Scheduler(model="another")
    print(told, second.load([key(i) for i in range(8)], "r1"), other.load([key(0)], "r1"))
    for i in range(100, 130):  # more than the host memory holds: what was first is only in the pool by now
        second.save([key(i)], f"s{i}")
    print(second.load([key(i) for i in range(6)], "r2"), second.tier.get_finished_jobs())
    second.tier.drain_jobs()
    for one in (first, second, other):
        one.manager.shutdown()
    """
)
DYING = (
    PRELUDE
    + """
    engine = Scheduler(timeout_s=2)
    engine.save([key(i) for i in range(4)], "r0")
    os.kill(int(sys.argv[2]), signal.SIGKILL)
    host, port = POOL.split(":")
    while not socket.socket().connect_ex((host, int(port))):
        time.sleep(0.01)
    engine.manager.reset_cache()
    print(engine.load([key(0), key(1)], "r1"))
    engine.save([key(9)], "r2")
    print(engine.load([key(9)], "r3"))
    engine.manager.shutdown()
    """
)


def test_one_engine_loads_what_another_saved(vllm_python: str, run_by: Callable[..., str], pool_node: Callable[..., NodeProcess]) -> None:
    """Chunks cascade to the pool and are promoted from it, by vLLM's own orders; another model's engine finds none; events are told."""
    source = ",".join(pool_node("--capacity", "16MiB").address for _ in range(2))
    lines = run_by(vllm_python, TWO_ENGINES, source, timeout_s=280).strip().split("\n")[-2:]
    assert lines == [
        "[('STORAGE', 6)] ['HIT', 'HIT', 'HIT', 'HIT', 'HIT', 'HIT', 'MISS', 'MISS'] ['MISS']",
        "['HIT', 'HIT', 'HIT', 'HIT', 'HIT', 'HIT'] []",
    ]


def test_dead_pool_is_misses(vllm_python: str, run_by: Callable[..., str], pool_node: Callable[..., NodeProcess]) -> None:
    """The scheduler goes on without its tier, what the host memory has stays a hit, and the engine ends."""
    node = pool_node("--capacity", "16MiB")
    lines = run_by(vllm_python, DYING, node.address, str(node.process.pid), timeout_s=280).strip().split("\n")[-2:]
    assert lines == ["['MISS', 'MISS']", "['HIT']"]
