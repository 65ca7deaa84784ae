#!/usr/bin/env bash
# versions.sh VERSION...: the wheel's test with an interpreter of each version; one that is not here is skipped,
# but not all of them. pip installs for the first, uv for the others: it unpacks what these share once.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
interpreter() { # interpreter VERSION: its path, from PATH, uv or pyenv
    local candidate
    for candidate in "$(command -v "python$1" || true)" "$(uv python find "$1" 2>/dev/null || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c "import ensurepip, sys; sys.exit(sys.version_info[:2] != (${1/./, }))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}
num_tested=0 uv=
for version in "$@"; do
    python=$(interpreter "$version")
    if [[ -n $python ]]; then
        echo "Python $version: $python"
        "$here/wheel.sh" "$python" $uv
        uv=$here/../../.venv/bin/uv
        num_tested=$((num_tested + 1))
    else
        echo "Python $version: skipped, no interpreter (looked for python$version, in uv and in pyenv)"
    fi
done
((num_tested)) || { echo "no interpreter of any of these versions: $*"; exit 1; }
