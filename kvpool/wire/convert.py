"""The only place where generated protobuf meets plain values (with its twin for worker messages, `convert_work.py`)."""

from collections.abc import Sequence

from kvpool.request.pool import DEFAULT_PRIORITY, Grant, NodeDescription, Outcome, Place, Reservation, ShmOffer, Stored, TcpOffer, UcxOffer
from kvpool.wire.gen import pool_pb2 as pb


def description_to_pb(value: NodeDescription) -> pb.DescribeResponse:
    """Spell a node's description."""
    message = pb.DescribeResponse(
        node_id=value.node_id,
        incarnation=value.incarnation,
        capacity_bytes=value.capacity_bytes,
        free_bytes=value.free_bytes,
        used_bytes=value.used_bytes,
        pinned_bytes=value.pinned_bytes,
        blocks=value.blocks,
        read_leases=value.read_leases,
        write_leases=value.write_leases,
        counters=value.counters,
        grpc_data=value.grpc_data,
    )
    if value.shm is not None:
        message.shm.CopyFrom(pb.ShmOffer(path=value.shm.path, boot_id=value.shm.boot_id, session=value.shm.session))
    if value.ucx is not None:
        ucx = value.ucx
        message.ucx.CopyFrom(
            pb.UcxOffer(worker_address=ucx.worker_address, rkey=ucx.rkey, base_address=ucx.base_address, length=ucx.length)
        )
    if value.tcp is not None:
        message.tcp.CopyFrom(pb.TcpOffer(address=value.tcp.address))
    return message


def description_from_pb(message: pb.DescribeResponse) -> NodeDescription:
    """Read a node's description."""
    shm = None
    if message.HasField("shm"):
        shm = ShmOffer(path=message.shm.path, boot_id=message.shm.boot_id, session=message.shm.session)
    ucx = None
    if message.HasField("ucx"):
        offer = message.ucx
        ucx = UcxOffer(worker_address=offer.worker_address, rkey=offer.rkey, base_address=offer.base_address, length=offer.length)
    return NodeDescription(
        node_id=message.node_id,
        incarnation=message.incarnation,
        capacity_bytes=message.capacity_bytes,
        free_bytes=message.free_bytes,
        used_bytes=message.used_bytes,
        pinned_bytes=message.pinned_bytes,
        blocks=message.blocks,
        read_leases=message.read_leases,
        write_leases=message.write_leases,
        counters=dict(message.counters),
        shm=shm,
        ucx=ucx,
        tcp=TcpOffer(address=message.tcp.address) if message.HasField("tcp") else None,
        grpc_data=message.grpc_data,
    )


def reservations_to_pb(blocks: Sequence[Reservation]) -> list[pb.Reservation]:
    """Spell reservations."""
    return [
        pb.Reservation(key=k, parent=p, depth=d, length=n, ttl_ms=t, priority=None if r == DEFAULT_PRIORITY else r, priority_ms=m)
        for k, p, d, n, t, r, m in blocks
    ]


def reservations_from_pb(messages: Sequence[pb.Reservation]) -> list[Reservation]:
    """Read reservations."""
    return [
        Reservation(m.key, m.parent, m.depth, m.length, m.ttl_ms, m.priority if m.HasField("priority") else DEFAULT_PRIORITY, m.priority_ms)
        for m in messages
    ]


def grants_to_pb(grants: Sequence[Grant]) -> list[pb.Grant]:
    """Spell grants."""
    return [pb.Grant(outcome=pb.Grant.Outcome.Name(outcome), offset=offset) for outcome, offset in grants]


def grants_from_pb(messages: Sequence[pb.Grant]) -> list[Grant]:
    """Read grants; an outcome we don't know raises ValueError, which the caller reports as a protocol error."""
    return [(Outcome(m.outcome), m.offset) for m in messages]


def places_to_pb(places: Sequence[Place | None]) -> list[pb.Found]:
    """Spell the answers of an acquire."""
    return [pb.Found() if p is None else pb.Found(hit=True, offset=p[0], length=p[1]) for p in places]


def places_from_pb(messages: Sequence[pb.Found]) -> list[Place | None]:
    """Read the answers of an acquire."""
    return [(m.offset, m.length) if m.hit else None for m in messages]


def stored_to_pb(blocks: Sequence[Stored | None]) -> list[pb.Found]:
    """Spell the answers of an acquire that asks for details."""
    return [pb.Found() if b is None else _stored_to_pb(b) for b in blocks]


def stored_from_pb(messages: Sequence[pb.Found]) -> list[Stored | None]:
    """Read the answers of an acquire that asked for details."""
    return [_stored_from_pb(m) if m.hit else None for m in messages]


def _stored_to_pb(block: Stored) -> pb.Found:
    return pb.Found(
        hit=True,
        offset=block.offset,
        length=block.length,
        parent=block.parent,
        depth=block.depth,
        ttl_ms=block.ttl_ms,
        sequence=block.sequence,
        tenant=block.tenant,
        priority=None if block.priority == DEFAULT_PRIORITY else block.priority,
        priority_ms=block.priority_ms,
    )


def _stored_from_pb(m: pb.Found) -> Stored:
    priority = m.priority if m.HasField("priority") else DEFAULT_PRIORITY
    return Stored(m.offset, m.length, m.parent, m.depth, m.ttl_ms, m.sequence, m.tenant, priority, m.priority_ms)
