#!/bin/sh
# user.sh: the user that every image runs as, and the folders that it owns.
set -eu
groupadd --gid 65532 tailrace
useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin tailrace
mkdir -p /runs /var/lib/tailrace /etc/tailrace /opt/user /opt/tailrace /opt/extra
chown 65532:65532 /runs /var/lib/tailrace /opt/user /opt/tailrace /opt/extra
