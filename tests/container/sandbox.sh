#!/usr/bin/env bash
# The escape and abuse suites inside an unprivileged container, as a cautious cluster would run the service: not
# root, no capabilities, Docker's default seccomp profile, a read-only root and a small writable /tmp.
#
# The image is Debian's Python from debootstrap, so it needs no registry; it stays in Docker's store and
# is made once. Packages and the suite are mounted into it. Where no Docker daemon answers, one runs for
# as long as the suite, without a network of its own. Needs root and, the first time, apt and a Debian
# mirror; where it cannot run it says why and exits with 77.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly DOCKER=/usr/bin/docker # Debian's: another on the PATH may be something else
readonly PYTHON=.venv/bin/python
readonly DEBIAN=bookworm
readonly DEBIAN_PYTHON=3.11
readonly IMAGE=tailrace-sandbox-test:$DEBIAN
readonly POLICY=/usr/sbin/policy-rc.d
readonly CANNOT=77
work=$(mktemp -d)
dockerd_pid=
made_policy=

cannot() {
    echo "the escape suite cannot run in a container here: $1" >&2
    [ ! -s "${2:-}" ] || tail -n 15 "$2" >&2
    exit "$CANNOT"
}

clean_up() {
    if [ -n "$dockerd_pid" ]; then
        kill "$dockerd_pid" 2>/dev/null || true
        wait "$dockerd_pid" 2>/dev/null || true
    fi
    [ -z "$made_policy" ] || rm -f "$POLICY"
    umount "$work/root/proc" 2>/dev/null || true # debootstrap leaves it when it is interrupted
    rm -rf --one-file-system "$work"
}

install_programs() {
    command -v debootstrap >/dev/null && [ -x "$DOCKER" ] && command -v dockerd >/dev/null && return
    command -v apt-get >/dev/null || cannot "docker.io and debootstrap are missing, and so is apt-get"
    if [ ! -e "$POLICY" ]; then # or the package starts a daemon that stays
        printf '#!/bin/sh\nexit 101\n' >"$POLICY"
        chmod +x "$POLICY"
        made_policy=yes
    fi
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        docker.io debootstrap; } >"$work/apt.log" 2>&1 ||
        cannot "apt-get could not install docker.io and debootstrap:" "$work/apt.log"
}

reach_docker() {
    export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}
    "$DOCKER" info >/dev/null 2>&1 && return
    export DOCKER_HOST=unix://$work/docker.sock
    setpriv --pdeathsig TERM dockerd --host "$DOCKER_HOST" --pidfile "$work/docker.pid" --exec-root "$work/exec" \
        --bridge none --iptables=false --ip6tables=false >"$work/dockerd.log" 2>&1 &
    dockerd_pid=$!
    for _ in $(seq 120); do
        "$DOCKER" info >/dev/null 2>&1 && return
        kill -0 "$dockerd_pid" 2>/dev/null || break
        sleep 0.5
    done
    cannot "dockerd does not start:" "$work/dockerd.log"
}

make_image() {
    "$DOCKER" image inspect "$IMAGE" >/dev/null 2>&1 && return
    echo "making the image $IMAGE: some minutes, once"
    debootstrap --variant=minbase --include=python3 "$DEBIAN" "$work/root" >"$work/debootstrap.log" 2>&1 ||
        cannot "debootstrap failed:" "$work/debootstrap.log"
    tar -C "$work/root" --exclude=./dev --exclude=./var/cache/apt --exclude=./var/lib/apt/lists -c . |
        "$DOCKER" import - "$IMAGE" >/dev/null
    rm -rf --one-file-system "$work/root"
}

run_suite() {
    # A copy that everybody may read, whoever owns the working tree. Of files alone: tar fails with a folder in
    # which another test leaves what Python compiled.
    mkdir "$work/tree"
    find pyproject.toml protos shared services tests -name __pycache__ -prune -o ! -type d -print0 |
        tar --null --files-from - -c | tar -x -C "$work/tree"
    chmod -R a+rX "$work" "$work/tree"
    local packages
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    "$DOCKER" run --rm --user 65532:65532 --cap-drop ALL --security-opt no-new-privileges --read-only \
        --network none --pids-limit 256 --memory 1g --tmpfs /tmp:rw,size=128m,mode=1777 \
        --volume "$work/tree:/tailrace:ro" --volume "$packages:/opt/site:ro" --workdir /tailrace \
        --env PYTHONPATH=/opt/site:protos:shared:services --env PYTHONDONTWRITEBYTECODE=1 \
        --env OMP_NUM_THREADS=1 --env HOME=/tmp \
        "$IMAGE" python3 -m pytest -q -p no:cacheprovider tests/integration/sandbox/test_escapes.py \
        tests/integration/sandbox/test_attacks.py tests/integration/sandbox/test_abuses.py
}

# Containers as places of tool code: the service runs here, its calls in the image.
run_docker_backend() {
    PATH=/usr/bin:$PATH TAILRACE_TEST_IMAGE=$IMAGE "$PYTHON" -m pytest -q -p no:cacheprovider \
        tests/integration/sandbox/test_docker.py
}

trap clean_up EXIT
[ "$(id -u)" = 0 ] || cannot "it makes an image with debootstrap, which needs root"
[ -x "$PYTHON" ] || cannot "there is no $PYTHON whose packages it could use (make .venv/ready-dev)"
"$PYTHON" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$DEBIAN_PYTHON')" ||
    cannot "$PYTHON is not Python $DEBIAN_PYTHON, the one of the image, so its packages do not fit"
install_programs
reach_docker
make_image
run_suite
run_docker_backend
