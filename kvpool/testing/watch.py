"""What a member sees of its cluster, one JSON line a change: `python -m kvpool.testing.watch --cluster URL --seconds 60`.

`at_ns` is monotonic and comparable on one machine; `nodes` maps ids to a state and an incarnation; `connected`: whether the membership
store answers.
"""

import argparse
import json
import time
from typing import Any

from kvpool.cluster import Membership, open_membership
from kvpool.policy.placement import node_from_info

_EVERY_S = 0.02


def seen(membership: Membership) -> dict[str, Any]:
    """The view now, without its time."""
    cut_off = membership.quarantined()
    nodes = {
        member.id: [
            str(node_from_info(member.id, member.info, quarantined=(member.role, member.id, member.incarnation) in cut_off).state),
            member.incarnation,
        ]
        for member in membership.members("node")
    }
    return {"connected": membership.connected, "nodes": nodes}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    until, last = time.monotonic() + options.seconds, None
    with open_membership(options.cluster) as membership:
        while time.monotonic() < until:
            now = seen(membership)
            if now != last:
                print(json.dumps({"at_ns": time.monotonic_ns(), **now}), flush=True)
                last = now
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    main()
