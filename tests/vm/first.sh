#!/bin/busybox sh
# The guest's first process: load what the disks need, unpack the repository (a tar archive, raw on the second disk), and go there.
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done < /modules/order
waited=0
until [ -b /dev/vdb ] || [ $waited -ge 300 ]; do sleep 0.1; waited=$((waited + 1)); done
mount -t ext4 /dev/vda /root && tar -x -f /dev/vdb -C /root/kvpool || { echo "no disks"; ls /dev; poweroff -f; }
for kind in proc sys dev; do mount --move /$kind /root/$kind; done
exec switch_root /root /bin/bash /kvpool/tests/vm/guest.sh
