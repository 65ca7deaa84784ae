#!/usr/bin/env bash
# The demo with one container per service, as the chart describes them: not root, read-only root, no
# capabilities. Three containers are killed on the way. Needs root and Docker's daemon; where no registry is
# reachable, debootstrap too. It exits with 77 where it cannot run, and says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
export DOCKER=${DOCKER:-docker}
"$DOCKER" info >/dev/null 2>&1 || { echo "no Docker daemon answers $DOCKER: start dockerd" >&2; exit 77; }
images/build.sh scheduler agents reward weight-sync run learner inference-torch
exec .venv-chart/bin/python tests/container/demo.py
