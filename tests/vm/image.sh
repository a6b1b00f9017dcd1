#!/usr/bin/env bash
# Make what the guest is made of in DIRECTORY, once: `root.img` (Debian 13: kernel modules, UCX with verbs, ndctl, Python, and what the
# tests import), `vmlinuz`, `initrd.gz`. Packages are downloaded and unpacked, never installed; no root is needed.
#
#   tests/vm/image.sh DIRECTORY
#
# Debian 13, because its kernel's Soft-RoCE and its libraries are young enough for UCX with verbs. That UCX itself comes out of the NIXL
# wheels of PyPI, in two versions: Debian's 1.18 is too old for RDMA (see kvpool/transport/ucx/session.py), the libucx wheels have no verbs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
made=$1
python=${PYTHON:-$repo/.venv/bin/python}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
suite=trixie guest_python=3.13

packages=(
    base-files bash dash coreutils sed grep tar mount procps kmod iproute2 libc-bin busybox-static zstd
    linux-image-amd64 libucx0 ucx-utils ibverbs-providers ibverbs-utils ndctl daxctl libpmem1 "python$guest_python"
)
# What the dependencies of these ask for and a guest without a GPU, mail or MPI never opens; 2 GB less.
unwanted='^(libamd|libhsa|librocm|libllvm|libclang|libopenmpi|libpmix|libhwloc|libpsm|libfabric|systemd|dracut|initramfs|linux-base|ucx-utils$|openmpi|udev|rocm)'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$made" "$root" "$work"/apt/{lists/partial,cache/archives/partial,etc}

echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" > "$work/apt/etc/sources.list"
: > "$work/apt/status"
apt=(
    -qq -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o APT::Sandbox::User=root -o Acquire::http::Timeout=30 -o Acquire::Retries=3
    -o Acquire::Languages=none -o Dir::Etc="$work/apt/etc" -o Dir::State="$work/apt" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache"
)
timeout 120 apt-get "${apt[@]}" update
timeout 60 apt-get "${apt[@]}" -s --no-install-recommends install "${packages[@]}" | awk '/^Inst /{print $2}' | sed 's/:amd64$//' |
    grep -Ev "$unwanted" | sort > "$work/names"
mkdir "$work/debs"
(cd "$work/debs" && xargs timeout 500 apt-get "${apt[@]}" download < "$work/names")

# base-files first: it makes /bin, /lib and /sbin links into /usr.
for deb in "$work"/debs/base-files_*.deb "$work"/debs/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -C "$root" -x --keep-directory-symlink --no-same-owner \
        --exclude './usr/share/doc/*' --exclude './usr/share/man/*' --exclude './usr/share/locale/*'
done
kernel=$(ls "$root/usr/lib/modules")
mv "$root"/boot/vmlinuz-* "$made/vmlinuz"
rm -rf "$root/boot"
printf 'root:x:0:0:root:/root:/bin/bash\n' > "$root/etc/passwd"
printf 'root:x:0:\n' > "$root/etc/group"
ln -sf "python$guest_python" "$root/usr/bin/python3"
/sbin/ldconfig -r "$root"
/sbin/depmod -b "$root" "$kernel"

# What the tests import, in the versions this repository is tested with; and the UCX of the wheel, to meet the system's.
pip=("$python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: --python-version "$guest_python" -c "$repo/constraints.txt")
timeout 300 "${pip[@]}" --target "$root/opt/site" numpy xxhash google-crc32c pytest pytest-asyncio pytest-timeout hypothesis
timeout 300 "${pip[@]}" --no-deps --target "$work/wheel" libucx-cu12
mkdir -p "$root/opt/wheel-ucx"
cp -a "$work"/wheel/libucx/lib/*.so.0* "$root/opt/wheel-ucx"
# A NIXL wheel brings a libibverbs that looks for drivers where Red Hat puts them: Debian's takes its place, and knows Soft-RoCE.
for both in 1.20=0.9.0 1.23=1.5.1; do
    timeout 300 "${pip[@]}" --no-deps --target "$work/nixl-$both" "nixl-cu12==${both#*=}"
    libraries=$root/opt/ucx/${both%=*}
    mkdir -p "$libraries"
    cp -a "$work/nixl-$both"/nixl_cu12.libs/{ucx,libuc[mpst]-*} "$libraries"
    rm -f "$libraries"/ucx/*{cuda,mlx5,efa,rdmacm,perftest}*
    ln -s /usr/lib/x86_64-linux-gnu/libibverbs.so.1 "$libraries/$(basename "$work/nixl-$both"/nixl_cu12.libs/libibverbs-*)"
done

# The first file system: busybox and the modules that the root disk needs.
first=$work/first
mkdir -p "$first"/{bin,modules}
cp "$root/usr/bin/busybox" "$first/bin/"
cp "$here/first.sh" "$first/init"
for module in virtio_pci virtio_blk ext4; do
    /sbin/modprobe -d "$root" -S "$kernel" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' > "$work/modules"
while read -r module; do
    name=$(basename "$module" .xz)
    xz -dc "$module" > "$first/modules/$name"
    echo "$name" >> "$first/modules/order"
done < "$work/modules"
(cd "$first" && find . | cpio --quiet -o -H newc -R 0:0) | gzip -1 > "$made/initrd.gz"

mkdir -p "$root"/{dev,proc,sys,run,tmp,kvpool,root}
size=$(($(du -sm "$root" | cut -f1) * 5 / 4 + 64))
/sbin/mke2fs -q -F -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d "$root" "$made/root.img.new" "${size}M"
mv "$made/root.img.new" "$made/root.img"
echo "made $made/root.img: $size MiB, Linux $kernel"
