#!/bin/bash
# run.sh [variants..]: builds, probes, checks and times; prints a compact table last. Under 3 minutes on 16 cores.
#   NOBUILD=1: what is built already.   NCU="0 5 9": also ncu's figures of these variants (some 15 s each).
here=$(cd "$(dirname "$0")" && pwd); B=${BUILD:-/tmp/wg}; O=${OUT:-/tmp/wg_out}; mkdir -p $O $B
variants=${*:-0 1 2 3 4 5 6 7 8 9 10 11 12 13}
t=$SECONDS; [ -n "$NOBUILD" ] || bash $here/build.sh $variants; echo "build: $((SECONDS - t)) s"; t=$SECONDS
timeout 60 $B/probe safe > $O/probe.txt 2>&1 || { tail -1 $O/probe.txt
  last=$(tail -1 $O/probe.txt | awk '{print $1}'); for i in $(seq $((last + 1)) 18); do timeout 20 $B/probe $i >> $O/probe.txt 2>&1; done; }
for i in 20 21 22 23; do timeout 20 $B/probe $i >> $O/probe.txt 2>&1; done
cat $O/probe.txt; echo "probe: $((SECONDS - t)) s"; t=$SECONDS
for v in $variants; do
  timeout 45 $B/gb$v all > $O/run$v.txt 2>&1; rc=$?
  [ $rc -le 1 ] || { echo "variant $v: exit $rc, again without the odd sizes" >> $O/run$v.txt; timeout 45 $B/gb$v fast >> $O/run$v.txt 2>&1; }
done
echo "bench: $((SECONDS - t)) s"; t=$SECONDS
for v in $NCU; do
  timeout 120 ncu --clock-control none --set full -k regex:conv_activation_moments_wgmma -c 1 $B/gb$v profile > $O/ncu$v.txt 2>&1
  echo "ncu of variant $v"; grep -E "Duration|SM Frequency|Issue Slots Busy|Executed Ipc Active|Eligible Warps|L2 Hit|DRAM Throughput|Bank conflicts|bank conflict|highest-utilized|tensor" -i $O/ncu$v.txt | cut -c1-150 | head -24
done
echo "odd sizes: $(cat $O/run*.txt | grep -c '^ok') ok, $(cat $O/run*.txt | grep -c '^FAIL') FAIL"
for v in $variants; do grep -hE "^FAIL|CUDA error|exit [0-9]|deadlock" $O/run$v.txt | sed "s/^/[$v] /"; done | head -40
grep -h "^variant  " $O/run*.txt | head -1
for v in $variants; do grep -hE "^(tf32|fp16|bf16|ieee)" $O/run$v.txt | grep -v "forward .* ms, kernel" | sort -u | sed "s/^/[$v] /"; done
