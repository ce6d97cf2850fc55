#!/usr/bin/env bash
# Check the CUDA paths of the streaming handle and measure them: one table, under five minutes on one H200, no network.
# Without a GPU it says so and exits 0. PYTHON chooses the interpreter; it needs torch, numpy and safetensors.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu_check: $PYTHON sees no GPU (or has no torch): nothing to check"
    exit 0
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 1 \
    experimental/gpu_check.py "$@"
