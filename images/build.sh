#!/usr/bin/env bash
# build.sh [TARGET...]: the images of a CPU cluster, or the named targets of the Dockerfile.
# build.sh --arguments: the build arguments as NAME=VALUE lines, for another builder. Environment:
# DOCKER (docker), BASE, BASE_BUILD, BASE_GPU, BASE_GPU_BUILD, TAG (0.1.0), REGISTRY, BUILD_FLAGS (as --sbom=true).
# Without BASE where no registry is reachable, images/make_base.sh makes bases from Debian's mirror first. A client
# that has BuildKit only with buildx, and no buildx, builds without.
# The wheels of pip's find-links folder and its certificates go along, its indexes as build arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
docker=${DOCKER:-docker}
if [ -z "${DOCKER_BUILDKIT:-}" ]; then
    major=$("$docker" version --format '{{.Client.Version}}' | cut -d. -f1)
    DOCKER_BUILDKIT=1
    [ "$major" -lt 23 ] || "$docker" buildx version >/dev/null 2>&1 || DOCKER_BUILDKIT=0
fi
export DOCKER_BUILDKIT
tag=${TAG:-0.1.0}
cpu=(scheduler agents gateway sandbox reward weight-sync autoscaler run learner inference-torch)
targets=("$@")
[ $# -gt 0 ] || targets=("${cpu[@]}")

setting() { # setting KEY: of pip, the environment first
    local name
    name=PIP_$(tr 'a-z-' 'A-Z_' <<<"$1")
    echo "${!name:-$(python3 -m pip config get "global.$1" 2>/dev/null || true)}"
}

default=$(sed -n 's/^ARG BASE=//p' Dockerfile)
if [ -z "${BASE:-}" ] && ! "$docker" image inspect "$default" >/dev/null 2>&1 && ! "$docker" pull --quiet "$default" >&2; then
    echo "$default cannot be pulled: a base from Debian's mirror instead" >&2
    DOCKER=$docker images/make_base.sh
    BASE=tailrace-base:bookworm BASE_BUILD=tailrace-build:bookworm
fi
arguments=()
for name in BASE BASE_BUILD BASE_GPU BASE_GPU_BUILD; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
links=$(setting find-links)
if [ -d "${links%% *}" ]; then cp -u "${links%% *}"/*.whl images/local/ 2>/dev/null || true; fi
certificates=$(setting cert)
[ -z "$certificates" ] || cp -u "$certificates" images/local/ca.crt
[ -z "$(setting index-url)" ] || arguments+=(--build-arg "PIP_INDEX_URL=$(setting index-url)")
extra=$(setting extra-index-url | tr ' ' '\n' | grep -v '^file:' | tr '\n' ' ' || true)
[ -z "${extra// /}" ] || arguments+=(--build-arg "PIP_EXTRA_INDEX_URL=$extra")
if [ "${1:-}" = --arguments ]; then
    printf '%s\n' ${arguments[@]+"${arguments[@]}"} | grep -vx -e --build-arg
    exit
fi
labels=()
for label in title=tailrace licenses=Apache-2.0 "revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)"; do
    labels+=(--label "org.opencontainers.image.$label")
done

for target in "${targets[@]}"; do
    # shellcheck disable=SC2086
    "$docker" build ${BUILD_FLAGS:-} ${arguments[@]+"${arguments[@]}"} "${labels[@]}" --target "$target" \
        --tag "${REGISTRY:+$REGISTRY/}tailrace-$target:$tag" .
done
