#!/usr/bin/env bash
# Tests and measurements on one NVIDIA GPU, each step with its own time limit and its own file, so that a cut call leaves results.
#   bash benchmarks/gpu/run.sh OUTPUT [--wheels DIR] STEP...      STEP: tests | tables | verdicts
# With --wheels, packages are installed from that folder beside the ones that are there.
set -uo pipefail
cd "$(dirname "$0")/../.."
output=$1; shift
if [ "${1:-}" = --wheels ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "$2"/*.whl || exit 1
    # Metadata of this package: its version is read from there.
    python3 - <<PY
from pathlib import Path
folder = Path("/tmp/site/profiling_agent-0.1.0.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: profiling-agent\nVersion: 0.1.0\n")
PY
    export PYTHONPATH=/tmp/site:$PWD
    shift 2
fi
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,temperature.gpu --format=csv | tee "$output/gpu.csv"
began=$SECONDS
step() { # NAME SECONDS COMMAND...: the output goes to NAME.log and its end to the terminal
    local name=$1 limit=$2; shift 2
    echo "== $name ($((SECONDS - began)) s)"
    timeout "$limit" "$@" > "$output/$name.log" 2>&1
    echo "-- $name: exit code $?, $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-12}" "$output/$name.log"
}
for each in "$@"; do
    case $each in
    tests) step tests "${TESTS_S:-240}" python3 -m pytest -m gpu -rA --tb=short -p no:cacheprovider -p no:randomly tests ;;
    tables) step tables "${TABLES_S:-300}" python3 benchmarks/gpu/deployments.py --json "$output/gpu_deployments.json" ${TABLES:-} ;;
    verdicts) step verdicts "${VERDICTS_S:-220}" python3 benchmarks/full_run.py --models ViT-B/16 --device cuda --runtimes eager,graphed \
        --time-budget 3m --batch-size 32 --output "$output/runs" --json "$output/gpu_verdicts.json" ${VERDICTS:-} ;;
    esac
done
