#!/usr/bin/env bash
# The escape suite inside an unprivileged container, as a cautious cluster would run the service: not
# root, no capabilities, Docker's default seccomp profile, a read-only root and a small writable /tmp.
# The image needs no registry: debootstrap makes it, once per content of this file and the pins.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON_FOR_WHEELS:-.venv/bin/python}
docker=/usr/bin/docker
tag=tailrace-sandbox-test:$(cat "$0" constraints.txt | sha256sum | cut -c1-12)

if ! command -v debootstrap >/dev/null || [ ! -x "$docker" ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        docker.io debootstrap iptables >/dev/null
fi
if ! "$docker" info >/dev/null 2>&1; then
    dockerd >/tmp/tailrace-dockerd.log 2>&1 &
    trap 'kill '$! EXIT
    for _ in $(seq 60); do "$docker" info >/dev/null 2>&1 && break; sleep 0.5; done
    if ! "$docker" info >/dev/null 2>&1; then
        echo "dockerd does not start here, so the suite cannot run in a container:" >&2
        tail -5 /tmp/tailrace-dockerd.log >&2
        exit 1
    fi
fi
if ! "$docker" image inspect "$tag" >/dev/null 2>&1; then
    root=$(mktemp -d)
    debootstrap --variant=minbase --include=python3 bookworm "$root" >/tmp/tailrace-debootstrap.log
    "$python" -m pip install --quiet --disable-pip-version-check --target "$root/opt/site" \
        --python-version 3.11 --only-binary=:all: -c constraints.txt \
        pytest pytest-asyncio pytest-timeout msgspec numpy nats-py redis structlog prometheus-client \
        opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc pyyaml xxhash uvloop \
        pyzmq nkeys hiredis
    tar -C "$root" --exclude=./dev --exclude=./var/cache/apt --exclude=./var/lib/apt/lists -c . |
        "$docker" import - "$tag" >/dev/null
    rm -rf "$root"
fi
"$docker" run --rm --user 65532:65532 --cap-drop ALL --security-opt no-new-privileges --read-only \
    --network none --pids-limit 256 --memory 1g --tmpfs /tmp:rw,size=128m,mode=1777 \
    --volume "$PWD:/tailrace:ro" --workdir /tailrace \
    --env PYTHONPATH=/opt/site:protos:shared:services --env PYTHONDONTWRITEBYTECODE=1 \
    --env OMP_NUM_THREADS=1 --env HOME=/tmp \
    "$tag" python3 -m pytest -q -p no:cacheprovider tests/integration/sandbox/test_escapes.py
