#!/bin/bash
# Process 1 of the guest: a Soft-RoCE device, an NVDIMM as /dev/dax0.0, then the parts named in /kvpool/parts, each a run of pytest.
# What is in /results at the end goes out as a tar archive, raw on the third disk. Lines that start with "vm:" are for who watches.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PYTHONPATH=/kvpool:/opt/site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /dev/shm /results
mount -t tmpfs shm /dev/shm
echo "vm: Linux $(uname -r) is up after $(cut -d. -f1 /proc/uptime) s"

# A veth pair: no wire and no card is needed, and an IB packet of 4 KiB fits its 9000 bytes.
ip link set lo up
modprobe -a veth rdma_rxe ib_uverbs
ip link add kv0 type veth peer name kv1
ip link set kv0 mtu 9000 address 02:00:00:00:00:01 up
ip link set kv1 mtu 9000 up
ip addr add 10.2.0.1/24 dev kv0
rdma link add rxe0 type rxe netdev kv0
echo "vm: $(rdma link show)"

modprobe -a nfit nd_pmem dax_pmem device_dax
ndctl create-namespace -f -e namespace0.0 -m devdax -a 2M > /results/namespace.json
echo "vm: $(ls -l /dev/infiniband/uverbs* /dev/dax* | tr '\n' ';')"

# Two settings for Soft-RoCE only. It doesn't tell UCX that a datagram came over IPv4, so UCX would drop it; and 7 retries, UCX's
# default, are endless to it.
export UCX_UD_VERBS_ETH_DGID_CHECK=n UCX_RC_VERBS_RETRY_COUNT=3

cd /kvpool
others=$(ls /opt/ucx/*/libucp* | tr '\n' ':')$(ls /opt/wheel-ucx/libucp.so.0 /usr/lib/x86_64-linux-gnu/libucp.so.0 | tr '\n' ':')
for part in $(cat parts); do
    export KVPOOL_UCX_LIBRARY= KVPOOL_TEST_UCX_LIBRARIES=
    case $part in
        dax) tests=(tests/vm/test_dax.py tests/tier/shared tests/tier/test_arena_on.py) ;;
        rdma-*)
            KVPOOL_UCX_LIBRARY=$(ls /opt/ucx/"${part#rdma-}"/libucp*)
            KVPOOL_TEST_UCX_LIBRARIES=$(echo "${others%:}" | tr ':' '\n' | grep -vxF "$KVPOOL_UCX_LIBRARY" | paste -s -d:)
            tests=(tests/vm/test_rdma.py tests/transport/test_ucx.py)
            ;;
    esac
    echo "vm: $part: ${tests[*]}"
    timeout 1500 python3 -m pytest -v -p no:cacheprovider --durations=10 "${tests[@]}" 2>&1 | tee "/results/$part.log"
    echo "${PIPESTATUS[0]}" > "/results/$part.code"
    echo "vm: $part: $(tail -1 "/results/$part.log") (up $(cut -d. -f1 /proc/uptime) s)"
done
tar -C /results -c -f /dev/vdc .
sync
echo o > /proc/sysrq-trigger
sleep 60
