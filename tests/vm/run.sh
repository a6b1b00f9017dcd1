#!/usr/bin/env bash
# Boot a guest that has an RDMA device (Soft-RoCE) and a memory device (an NVDIMM as /dev/dax0.0), run the tests that need them in it.
#
#   tests/vm/run.sh [PART...]     parts: dax, rdma-1.20, rdma-1.23 (all of them)
#
# No root, no network card, no KVM: QEMU plays the machine (TCG), one CPU of it. Correctness only; docs/rdma.md says what it proves.
# Its clock counts instructions (2 ns each) and skips what it sleeps, so a host that is busy with other things makes no deadline in it shorter.
# KVPOOL_VM_CACHE: in whose folder kvpool-vm the guest's disk is kept, ~/.cache (0.6 GB, made on first use from Debian's and PyPI's packages).
# KVPOOL_VM_SECONDS: how long the guest may take. KVPOOL_VM_KEEP: a directory for its console and what pytest said.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
cache=${KVPOOL_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}}/kvpool-vm
seconds=${KVPOOL_VM_SECONDS:-3600}
parts=${*:-dax rdma-1.20 rdma-1.23}

missing=
for tool in qemu-system-x86_64:qemu-system-x86 cpio:cpio depmod:kmod mke2fs:e2fsprogs xz:xz-utils dpkg-deb:dpkg apt-get:apt; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${tool%%:*}" > /dev/null || missing="$missing ${tool##*:}"
done
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing="$missing debian-archive-keyring"
if [ -n "$missing" ]; then
    echo "skipped: the guest can't be made or booted without$missing; apt-get install --no-install-recommends$missing"
    exit 0
fi

stamp=$(cat "$here/image.sh" "$here/first.sh" "$repo/constraints.txt" | sha256sum | cut -c1-16)
image=$cache/$stamp
if [ ! -e "$image/root.img" ]; then
    rm -rf "$cache"
    timeout 1200 "$here/image.sh" "$image" || { echo "the guest's disk could not be made: it needs Debian's and PyPI's packages"; exit 1; }
fi

work=$(mktemp -d)
guest=
trap '[ -z "$guest" ] || kill "$guest" 2> /dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/tree"
(cd "$repo" && git ls-files -z -co --exclude-standard kvpool tests pyproject.toml | tar --null -T - -c) | tar -C "$work/tree" -x
echo "$parts" > "$work/tree/parts"
tar -C "$work/tree" -cf "$work/tree.tar" .
truncate -s 16M "$work/results.img"

nice -n 10 timeout "$seconds" qemu-system-x86_64 -machine q35,accel=tcg,nvdimm=on -cpu max -smp 1 -icount shift=1,sleep=off -rtc clock=vm \
    -m 2048,slots=2,maxmem=4G \
    -object memory-backend-ram,id=nv0,size=514M -device nvdimm,memdev=nv0,id=nvd0,label-size=128K \
    -display none -serial stdio -monitor none -no-reboot -nic none \
    -kernel "$image/vmlinuz" -initrd "$image/initrd.gz" -append "console=ttyS0 quiet panic=-1" \
    -drive file="$image/root.img",if=virtio,format=raw,snapshot=on \
    -drive file="$work/tree.tar",if=virtio,format=raw,readonly=on \
    -drive file="$work/results.img",if=virtio,format=raw < /dev/null > "$work/console" 2>&1 &
guest=$!
tail -n +1 -s 1 -F --pid="$guest" "$work/console" 2> /dev/null | sed -u 's/\r//; s/\x1b[^a-zA-Z]*[a-zA-Z]//g' | grep --line-buffered -a '^vm:' || true
wait "$guest" && ended=0 || ended=$?
guest=

mkdir "$work/results"
tar -C "$work/results" -xf "$work/results.img" 2> /dev/null || true
if [ -n "${KVPOOL_VM_KEEP:-}" ]; then
    mkdir -p "$KVPOOL_VM_KEEP"
    cp -r "$work/console" "$work/results/." "$KVPOOL_VM_KEEP"
fi
failed=
for part in $parts; do
    code=$(cat "$work/results/$part.code" 2> /dev/null || echo missing)
    [ "$code" = 0 ] || failed="$failed $part($code)"
done
if [ -n "$failed" ]; then
    cat "$work"/results/*.log 2> /dev/null | tail -300 || true
    [ "$ended" = 0 ] || { tail -40 "$work/console"; echo "the guest ended with $ended (124: not within $seconds s)"; }
    echo "failed:$failed"
    exit 1
fi
echo "passed in the guest: $parts"
