#!/bin/bash
# build.sh [variants..]: probe and the bench's variants, side by side, into $BUILD (/tmp/wg). About 40 s on 16 cores.
here=$(cd "$(dirname "$0")" && pwd); B=${BUILD:-/tmp/wg}; mkdir -p $B
variants=${*:-0 1 2 3 4 5 6 7 8 9 10 11 12 13}
flags="-std=c++17 -gencode=arch=compute_90a,code=sm_90a -I $here/csrc"
nvcc -O2 $flags -o $B/probe $here/probe.cu > $B/probe.log 2>&1 &
for v in $variants; do
  nvcc -O3 $flags -Xptxas -v -DONLY=$v -o $B/gb$v $here/gpu_bench.cu > $B/build$v.log 2>&1 &
done
wait
for v in $variants; do
  [ -x $B/gb$v ] || { echo "variant $v: no program"; grep -m3 error $B/build$v.log; }
  grep -lE "C75[0-9][0-9]" $B/build$v.log
done
[ -x $B/probe ] || { echo "probe: no program"; grep -m3 error $B/probe.log; }
true
