#!/usr/bin/env bash
# wheel.sh PYTHON [UV]: build the wheel and use it as a newcomer does, in an empty environment outside of the
# checkout. pip installs it, or the uv that is given.
set -euo pipefail
python=$1 uv=${2:-}
source=$(cd "$(dirname "$0")/../.." && pwd)
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
install() {
    local installer=("$home/env/bin/pip" install --disable-pip-version-check --no-compile)
    [[ -z $uv ]] || installer=("$uv" pip install --python "$home/env/bin/python")
    "${installer[@]}" --quiet -c "$source/constraints.txt" "$@"
}
expect() { # expect TEXT COMMAND...: the output holds the text
    local text=$1 output
    shift
    output=$("$@" 2>&1) || true
    [[ $output == *"$text"* ]] || { printf 'failed: %s\nexpected: %s\nprinted: %s\n' "$*" "$text" "$output"; exit 1; }
    num_passed=$((num_passed + 1))
}
num_passed=0

"$python" -m venv "$home/env"
export GITHUB_REPOSITORY=${GITHUB_REPOSITORY:-example/tailrace} # as in a workflow: the wheel names its repository
"$home/env/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$home/wheel" "$source"
wheel=$(echo "$home"/wheel/tailrace-*.whl)
cd "$home"
install "$wheel"
expect "'tailrace[cli]'" env/bin/tailrace train lake
expect "0.1.0" env/bin/python -c 'import tailrace; print(tailrace.__version__)'
expect "Repository, https://" env/bin/python -c \
    'from importlib.metadata import metadata; print(metadata("tailrace").get_all("Project-URL"))'
install torch
install "$wheel[all]"
expect "tailrace 0.1.0" env/bin/tailrace --version
expect "tailrace 0.1.0" env/bin/python -m tailrace --version
expect "1.0 1.0 1.0 1.0 1.0 1.0 1.0" env/bin/python -c 'from tailrace.scorers import aime, em, f1, gsm8k, json_schema, math, mcq
print(math("It is 1/2.", "0.5"), gsm8k("#### 7", "7"), aime("It is 7.", "7"), mcq("Answer: B", "B"), f1("Paris", "paris"), em("Paris", "paris"),
    json_schema("[1]", None, {"json_schema": {"type": "array"}}))'
if [[ -z $uv ]]; then # once: it is the same with every Python
    expect "frozen_lake" env/bin/tailrace init
    expect "tailrace train frozen_lake" env/bin/tailrace init frozen_lake
    for example in tools tool_worker_js notebooks; do
        expect "follow $example/README.md" env/bin/tailrace init "$example"
    done
else
    env/bin/tailrace init frozen_lake >/dev/null
fi
expect "valid" env/bin/tailrace validate frozen_lake
env/bin/tailrace init calculator >/dev/null
page=$(grep -o '([^)]*/docs/results.md)' calculator/README.md | head -n 1 | tr -d '()')
expect "# " head -n 1 "$page"
expect "report.html" env/bin/tailrace train frozen_lake max_steps=2 eval_steps=2 save_steps=2 \
    learner.warm_start.num_steps=20 scheduler.eval_groups=16 scheduler.eval_interim_groups=8 \
    agents.custom_envs.frozen_lake.env_config.invalid_action_penalty=0.1 # rewards differ
expect "step_2" ls runs/frozen_lake/checkpoints
expect "finished" env/bin/tailrace status frozen_lake
rm runs/frozen_lake/report.html
expect "report.html" env/bin/tailrace report frozen_lake
expect "<!doctype html>" head -c 15 runs/frozen_lake/report.html
echo "$num_passed passed, 0 failed"
