#!/bin/sh
# The device part of drivetrain-transport on two GPUs: its tests, then its benchmark. Results go to $OUT (default .).
set -u
OUT=${OUT:-.}
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/packages/transport/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
failed=0
timeout 300 "$PYTHON" -m pytest -m "gpu or multigpu" -W default --timeout=90 --durations=5 -q \
    tests/transport/test_group.py tests/transport/test_ipc.py tests/cases/test_TRP_08.py || failed=1
timeout 240 "$PYTHON" -m pytest benchmarks/bench_device.py -m "gpu or multigpu" -W default --timeout=200 -q \
    --benchmark-only --benchmark-quiet --benchmark-json="$OUT/device.json" || failed=1
"$PYTHON" - "$OUT/device.json" <<'PY'
import json, sys
for item in json.load(open(sys.argv[1]))["benchmarks"]:
    extra = item["extra_info"]
    print(f"{item['name']:40} {item['stats']['median'] * 1e3:9.3f} ms  ratio {extra['ratio']:.3f} of owed {extra['owed']}", extra)
PY
exit $failed
