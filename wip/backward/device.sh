#!/bin/bash
# On the device, from the repository root: bash .dev/device.sh [check|time|all] [kind]
# .dev/gpu_bench is a binary built elsewhere; it is built again here if it does not start.
B=.dev/gpu_bench
chmod +x $B 2>/dev/null
$B none none > /dev/null 2>&1   # neither checks nor times a kind: only opens the device
if [ $? -gt 1 ]; then
  echo "building"
  nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -w -Icsrc -Itests/emulation .dev/gpu_bench.cu -o $B || exit 1
fi
$B ${1:-all} $2 | tee ${OUT:-/tmp}/gpu_bench.txt
