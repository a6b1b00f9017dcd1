#!/usr/bin/env bash
# Make the image that tests/hosts/test_docker.py runs, without asking any registry of images: Debian 12 with Python and a Redis server
# by debootstrap, this working tree and what it needs as wheels, `docker import`.
#
#   apt-get install --no-install-recommends docker.io iptables debootstrap
#   tests/hosts/images.sh [IMAGE]     (local/kvpool:test)
#
# Needs root, a Docker engine that answers, and the virtual environment that `make install` makes (or PYTHON=...).
set -euo pipefail
cd "$(dirname "$0")/../.."
image=${1:-local/kvpool:test}
python=${PYTHON:-.venv/bin/python}

docker version --format 'engine {{.Server.Version}}'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/source" "$work/wheels"
git ls-files -z | tar --null -T - -c | tar -C "$work/source" -x # pip leaves its build folders there, not here
"$python" -m pip wheel --quiet --no-deps -w "$work/wheels" "$work/source"
# redis wants async-timeout of a Python older than 3.11.3, as Debian's is; this one may be newer.
"$python" -m pip download --quiet --only-binary=:all: --python-version 3.11 -c constraints.txt -d "$work/wheels" \
    "$work"/wheels/kvpool-*.whl async-timeout

debootstrap --variant=minbase --include=python3,python3-venv,redis-server bookworm "$work/rootfs" > "$work/debootstrap.log" ||
    { tail -20 "$work/debootstrap.log"; exit 1; }
mkdir "$work/rootfs/wheels"
cp "$work"/wheels/*.whl "$work/rootfs/wheels"
chroot "$work/rootfs" python3 -m venv /opt/kvpool
chroot "$work/rootfs" env -i /opt/kvpool/bin/python -m pip install --quiet --no-index --find-links /wheels kvpool
rm -rf "$work/rootfs/wheels" "$work"/rootfs/var/cache/apt/archives/*.deb "$work"/rootfs/var/lib/apt/lists/*

tar -C "$work/rootfs" -c . | docker import --change 'ENV PATH=/opt/kvpool/bin:/usr/local/bin:/usr/bin:/bin' - "$image" > /dev/null
echo "made $image"
