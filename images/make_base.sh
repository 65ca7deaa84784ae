#!/usr/bin/env bash
# make_base.sh: base images from Debian's mirror, where no registry is reachable: tailrace-base (Python) and
# tailrace-build (the same with venv and strip). Needs root, debootstrap and Docker; some minutes, once.
set -euo pipefail
docker=${DOCKER:-docker}
debian=${DEBIAN:-bookworm}
if "$docker" image inspect "tailrace-base:$debian" "tailrace-build:$debian" >/dev/null 2>&1; then exit; fi
work=$(mktemp -d)
trap 'umount "$work/root/proc" 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT

import() { # import NAME [WITHOUT...]: the tree without what no service reads
    local name=$1 path without=()
    shift
    for path in dev proc var/cache/{apt,debconf} var/lib/apt usr/share/{doc,man,info,locale,bash-completion} "$@"; do
        without+=("--exclude=./$path")
    done
    tar -C "$work/root" "${without[@]}" -c . | "$docker" import - "$name:$debian" >/dev/null
}

# vLLM on a CPU loads libnuma.
debootstrap --variant=minbase --include=python3,ca-certificates,libnuma1 "$debian" "$work/root" >"$work/log" 2>&1 ||
    { tail -n 15 "$work/log" >&2; exit 1; }
# Nothing is installed later: Debian's own programs, and what they alone load. What it is made of stays listed.
import tailrace-base usr/lib/apt 'usr/bin/apt*' usr/bin/gpgv 'usr/lib/*/libapt-*' usr/bin/perl 'usr/bin/perl5*' \
    'usr/lib/*/perl-base' usr/share/perl5 'usr/bin/dpkg*' usr/lib/dpkg var/lib/dpkg/info 'usr/lib/*/gconv' \
    'usr/lib/*/libdb-5*' usr/sbin/{mke2fs,mkfs.ext,e2fsck,fsck.ext,resize2fs,tune2fs,debugfs}'*' usr/share/polkit-1 \
    usr/lib/python3.11/{lib2to3,pydoc_data,idlelib,ensurepip}
chroot "$work/root" apt-get install -qy --no-install-recommends python3-venv binutils >"$work/log" 2>&1 ||
    { tail -n 15 "$work/log" >&2; exit 1; }
import tailrace-build
